"""The protocol: framing, handshake, kinds of error."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine import protocol

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text().filter(lambda key: key != "__bytes__"), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text().filter(lambda key: key != "__bytes__"), json_values | st.binary()))
def test_what_is_encoded_is_one_line_and_decodes_to_itself(message):
    line = protocol.encode(message)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert protocol.decode(line) == message


def test_values_that_stacks_give_get_a_json_form():
    @dataclass(frozen=True)
    class Kind:
        features: frozenset[str]

    message = {"tile": np.int64(64), "share": np.float32(0.5), "kind": Kind(frozenset({"b", "a"})), "code": b"\x00\xff"}
    assert protocol.decode(protocol.encode(message)) == {
        "tile": 64,
        "share": 0.5,
        "kind": {"features": ["a", "b"]},
        "code": b"\x00\xff",
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), np.zeros(2)])
def test_what_has_no_json_form_is_refused(value):
    with pytest.raises(protocol.ProtocolError):
        protocol.encode({"value": value})


@pytest.mark.parametrize("line", [b"", b"hello\n", b"[1, 2]\n", b'{"a": \n', b"\xff\n", b'{"__bytes__": 1}\n'])
def test_a_line_that_is_no_message_is_refused(line):
    with pytest.raises(protocol.ProtocolError):
        protocol.decode(line)


@given(st.lists(st.dictionaries(st.text(), st.integers()), max_size=5), st.integers(1, 7))
def test_messages_are_found_whatever_pieces_they_arrive_in(messages, size):
    stream = b"".join(protocol.encode(m) for m in messages)
    splitter = protocol.Splitter()
    found = [m for at in range(0, len(stream), size) for m in splitter.feed(stream[at : at + size])]
    assert found == messages


def test_a_line_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(protocol, "MAX_LINE_BYTES", 100)
    splitter = protocol.Splitter()
    with pytest.raises(protocol.ProtocolError, match="longer"):
        for _ in range(20):
            splitter.feed(b"x" * 10)


def test_a_handshake_is_accepted_by_the_version_that_made_it():
    greeting = protocol.handshake("xla", "3.12.1", 42, {"jax": "0.11.2", "numpy": "2.4.0"})
    assert json.loads(protocol.encode(greeting)) == {
        "protocol": protocol.VERSION,
        "stack": "xla",
        "python": "3.12.1",
        "pid": 42,
        "versions": {"jax": "0.11.2", "numpy": "2.4.0"},
    }
    protocol.check_handshake(greeting, "xla")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"protocol": protocol.VERSION + 1}, f"protocol {protocol.VERSION + 1} and this harness {protocol.VERSION}"),
        ({"protocol": None}, "speaks protocol None"),
        ({"stack": "tvm"}, "'tvm'"),
        ({"versions": ["jax"]}, "incomplete"),
        ({"versions": {"jax": None}}, "incomplete"),
        ({"pid": "42"}, "incomplete"),
    ],
)
def test_another_handshake_is_refused_in_one_sentence(change, says):
    greeting = protocol.handshake("xla", "3.12.1", 42, {"jax": "0.11.2"}) | change
    with pytest.raises(protocol.ProtocolError, match=says) as refusal:
        protocol.check_handshake(greeting, "xla")
    assert "\n" not in str(refusal.value) and str(refusal.value).endswith(".")


def test_replies_of_both_kinds_are_well_formed():
    protocol.check_reply(protocol.result(1, {"load_s": 0.5}))
    for kind in protocol.ERROR_KINDS:
        protocol.check_reply(protocol.error(1, kind, "It cannot.", ""))


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"id": 1},
        {"id": 1, "ok": True},
        {"id": 1, "ok": False, "error": {"kind": "failed"}},
        # A worker cannot report its own death.
        protocol.error(1, "crashed", "It died.", ""),
        protocol.error(1, "timeout", "It hung.", ""),
        protocol.error(1, "memory", "It ate.", ""),
    ],
)
def test_anything_else_is_no_reply(message):
    with pytest.raises(protocol.ProtocolError, match="Not a reply"):
        protocol.check_reply(message)
