"""Messages between the harness and a worker: one JSON object per line, over two pipes that nothing else uses.

Owns the version, the framing, the handshake and the kinds of error. It does not own what the operations mean
(operations) or how long an answer may take (pool). Standard library only: it runs in every stack's environment.

The worker speaks first: one handshake, or one refusal with id 0 where it cannot even begin. After that every request
has exactly one reply, in order.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

#: Changes with every incompatible change of a message.
VERSION = 1
#: What a worker itself may report. Crashes, deadlines and memory are seen from outside only.
ERROR_KINDS = ("unsupported", "failed", "protocol")
#: A line longer than this is not a message: artefacts (generated code) are a few MB at most.
MAX_LINE_BYTES = 2**28

_BYTES_KEY = "__bytes__"

Message = dict[str, Any]


class ProtocolError(Exception):
    """A message that cannot be, or a peer that speaks another version; the message is one sentence."""


def encode(message: Mapping[str, Any]) -> bytes:
    """One line. Besides JSON's own types it takes bytes, dataclasses, sets and NumPy scalars.

    Raises:
        ProtocolError: something in it has no JSON form (NaN and infinities have none either).
    """
    try:
        return json.dumps(message, default=_plain, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"A message cannot be written as JSON: {error}.") from None


def decode(line: bytes) -> Message:
    """The message in one line.

    Raises:
        ProtocolError: the line is no JSON object.
    """
    try:
        message = json.loads(line, object_hook=_bytes_again)
    except (ValueError, RecursionError):
        raise ProtocolError(f"Not a JSON line: {line[:80]!r}.") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"Not a JSON object: {line[:80]!r}.")
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES_KEY: base64.b64encode(value).decode("ascii")}
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _bytes_again(found: Message) -> Any:
    if set(found) != {_BYTES_KEY}:
        return found
    try:
        return base64.b64decode(found[_BYTES_KEY], validate=True)
    except (TypeError, binascii.Error) as error:
        raise ValueError(str(error)) from None


class Splitter:
    """Cuts a stream of bytes into messages, whatever the pieces it arrives in."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[Message]:
        """The messages that are complete now.

        Raises:
            ProtocolError: a line is no message, or grows without end.
        """
        *ends, rest = piece.split(b"\n")
        messages = []
        for end in ends:
            messages.append(decode(b"".join([*self._pieces, end])))
            self._pieces, self._size = [], 0
        if rest:
            self._pieces.append(rest)
            self._size += len(rest)
        if self._size > MAX_LINE_BYTES:
            raise ProtocolError(f"A line is longer than {MAX_LINE_BYTES >> 20} MiB.")
        return messages


# --- the handshake --------------------------------------------------------------------------------------------------


def handshake(stack: str, python: str, pid: int, versions: Mapping[str, str]) -> Message:
    """A worker's first line.

    Args:
        stack: the stack it serves.
        python: its Python's version.
        pid: its process.
        versions: distribution -> version, for the record.
    """
    return {"protocol": VERSION, "stack": stack, "python": python, "pid": pid, "versions": dict(versions)}


def check_handshake(message: Message, stack: str) -> None:
    """Whether a worker's first line is that of ``stack`` in this version.

    Raises:
        ProtocolError: it is not; the message says what to do.
    """
    version = message.get("protocol")
    if version != VERSION:
        raise ProtocolError(
            f"The worker of {stack} speaks protocol {version} and this harness {VERSION}: "
            "let both come from the same checkout."
        )
    if message.get("stack") != stack:
        raise ProtocolError(f"The worker of {stack} says that it serves {message.get('stack')!r}.")
    versions = message.get("versions")
    if not (
        isinstance(message.get("python"), str)
        and isinstance(message.get("pid"), int)
        and isinstance(versions, dict)
        and all(isinstance(v, str) for v in versions.values())
    ):
        raise ProtocolError(f"The handshake of the worker of {stack} is incomplete: {message}.")


# --- requests and replies -------------------------------------------------------------------------------------------


def request(number: int, op: str, args: Mapping[str, Any]) -> Message:
    """What the harness asks."""
    return {"id": number, "op": op, **args}


def result(number: int, value: Mapping[str, Any]) -> Message:
    """The reply to a request that was met."""
    return {"id": number, "ok": True, "result": dict(value)}


def error(number: int, kind: str, message: str, traceback: str) -> Message:
    """The reply to a request that was not met.

    Args:
        number: the request's id.
        kind: one of ``ERROR_KINDS``.
        message: one sentence.
        traceback: where it happened.
    """
    return {
        "id": number,
        "ok": False,
        "error": {"kind": kind, "message": message, "traceback": traceback},
    }


def check_reply(message: Message) -> None:
    """Whether a line is a well-formed reply.

    Raises:
        ProtocolError: it is not.
    """
    if isinstance(message.get("id"), int):
        if message.get("ok") is True and isinstance(message.get("result"), dict):
            return
        fault = message.get("error")
        if (
            message.get("ok") is False
            and isinstance(fault, dict)
            and fault.get("kind") in ERROR_KINDS
            and isinstance(fault.get("message"), str)
            and isinstance(fault.get("traceback"), str)
        ):
            return
    raise ProtocolError(f"Not a reply: {str(message)[:200]}.")
