"""The worker process by itself, spoken to in raw JSON lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine import protocol
from benchmarks.engine.buffers import Arena, view
from tests.adversaries import stage


class Peer:
    """The harness's side of the pipes, without the pool."""

    def __init__(self, folder: Path, *, path: str = str(stage.ROOT), cpus: str = "0", parent: int | None = None):
        requests, self.to_worker = os.pipe()
        self.from_worker, replies = os.pipe()
        argv = [sys.executable, "-m", "benchmarks.engine.worker", "--stack", "cheats", "--device", "cpu"]
        argv += ["--cpus", cpus, "--requests", str(requests), "--replies", str(replies)]
        argv += ["--parent", str(parent or os.getpid())]
        self.log = folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv,
                pass_fds=(requests, replies),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path, "RIDGEMARK_EXTRA_STACKS": stage.STACKS},
            )
        os.close(requests)
        os.close(replies)
        self.lines = os.fdopen(self.from_worker, "rb")

    def read(self) -> dict:
        return json.loads(self.lines.readline())

    def ask(self, number: int, op: str, **args) -> dict:
        os.write(self.to_worker, json.dumps({"id": number, "op": op, **args}).encode() + b"\n")
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.lines.close()
        os.close(self.to_worker)


@pytest.fixture
def peer(tmp_path):
    peer = Peer(tmp_path)
    yield peer
    peer.close()


@pytest.fixture
def arena():
    arena = Arena("test")
    yield arena
    arena.close()


def put(arena: Arena, seed: int) -> dict:
    return {name: arena.put(array, "f32") for name, array in stage.inputs(seed).items()}


def prepare(peer: Peer, adversary: str) -> dict:
    device = {"kind": "cpu", "name": "test", "arch": "x", "threads": 1, "memory_bytes": 2**30, "features": ["avx2"]}
    return peer.ask(1, "prepare", program="p", impl=f"cheats.{adversary}", case=stage.CASE, device=device)


def test_it_greets_first_and_says_what_it_is(peer):
    greeting = peer.read()
    assert greeting["protocol"] == protocol.VERSION
    assert greeting["stack"] == "cheats"
    assert greeting["pid"] == peer.process.pid
    assert greeting["python"] == ".".join(map(str, sys.version_info[:3]))
    # What the stack's env.toml lists under report, and NumPy.
    assert set(greeting["versions"]) == {"numpy", "ml_dtypes"}
    assert greeting["versions"]["numpy"] == np.__version__


def test_a_case_from_its_preparation_to_its_release(peer, arena):
    peer.read()
    answer = prepare(peer, "honest")
    assert answer["ok"] and set(answer["result"]) == {"prepare_s", "config", "flags", "artefacts"}
    assert peer.ask(2, "load", program="p", set=0, inputs=put(arena, 0))["result"]["load_s"] >= 0

    output, descriptor = arena.array((stage.M, stage.N), "f32")
    block = peer.ask(3, "block", program="p", sets=[0, 0], keep={"1": {"C": descriptor}}, poison=True)
    given = stage.inputs(0)
    np.testing.assert_allclose(output, given["A"] @ given["B"], rtol=1e-4, atol=1e-4)
    assert len(block["result"]["samples_us"]) == 2

    # Refilled in place: the program wrapped the arrays that load gave it.
    assert peer.ask(4, "refill", program="p", set=0, inputs=put(arena, 7))["ok"]
    peer.ask(5, "block", program="p", sets=[0], keep={"0": {"C": descriptor}}, poison=True)
    given = stage.inputs(7)
    np.testing.assert_allclose(output, given["A"] @ given["B"], rtol=1e-4, atol=1e-4)

    as_given = put(arena, 7)
    assert peer.ask(6, "changed", program="p", set=0, inputs=as_given)["result"]["bytes"] == {"A": 0, "B": 0}
    view(as_given["B"])[3, 5] *= -1
    assert peer.ask(6, "changed", program="p", set=0, inputs=as_given)["result"]["bytes"] == {"A": 0, "B": 1}  # a sign

    released = peer.ask(7, "release", program="p")
    assert released["ok"] and released["result"]["peak_memory_bytes"] >= 0
    assert peer.ask(8, "load", program="p", set=0, inputs={})["error"]["message"] == "There is no program 'p' here."
    assert peer.ask(9, "shutdown")["ok"]
    assert peer.process.wait(10) == 0


@pytest.mark.parametrize(
    ("op", "args", "says"),
    [
        ("fly", {}, "There is no operation 'fly'."),
        ("release", {"program": "q"}, "There is no program 'q' here."),
        ("release", {}, "release: missing a required argument: 'program'."),
        ("release", {"program": "p", "force": True}, "release: got an unexpected keyword argument 'force'."),
        ("block", {"program": "p", "sets": [3], "keep": {}, "poison": True}, "Input set 3 is not loaded."),
        ("refill", {"program": "p", "set": 0, "inputs": {}}, "Input set 0 is not loaded."),
    ],
)
def test_requests_that_do_not_fit_are_refused_and_the_worker_goes_on(peer, op, args, says):
    peer.read()
    prepare(peer, "honest")
    answer = peer.ask(2, op, **args)
    assert (answer["id"], answer["ok"]) == (2, False)
    assert answer["error"]["kind"] == "protocol" and answer["error"]["message"] == says
    assert peer.ask(3, "release", program="p")["ok"]


def test_a_call_that_a_block_does_not_have_cannot_be_kept(peer, arena):
    peer.read()
    prepare(peer, "honest")
    peer.ask(2, "load", program="p", set=0, inputs=put(arena, 0))
    answer = peer.ask(3, "block", program="p", sets=[0], keep={"1": {}}, poison=True)
    assert answer["error"] == {**answer["error"], "kind": "protocol", "message": "A block of 1 calls has no call 1."}


def test_a_set_is_refilled_with_what_it_was_loaded_with_or_not_at_all(peer, arena):
    peer.read()
    prepare(peer, "honest")
    peer.ask(2, "load", program="p", set=0, inputs=put(arena, 0))
    other = {"A": arena.array((3, 3), "f32")[1], "B": arena.array((3, 3), "f32")[1]}
    assert peer.ask(3, "refill", program="p", set=0, inputs=other)["error"]["kind"] == "protocol"


@pytest.mark.parametrize(
    ("adversary", "kind", "says"),
    [
        ("raises_in_prepare", "failed", "prepare raised ValueError: no tile fits."),
        ("refuses_late", "unsupported", "Its compiler knows no such tile."),
        ("nowhere", "failed", "prepare raised UnknownName: no implementation 'cheats.nowhere' of gemm"),
        ("unreportable_config", "failed", "prepare gave what cannot be reported."),
    ],
)
def test_errors_while_building_carry_their_kind_and_one_sentence(peer, adversary, kind, says):
    peer.read()
    error = prepare(peer, adversary)["error"]
    assert error["kind"] == kind
    assert error["message"].startswith(says) and "\n" not in error["message"]


def test_standard_output_goes_to_the_log_and_never_into_the_protocol(peer, arena):
    peer.read()
    prepare(peer, "chatty")
    peer.ask(2, "load", program="p", set=0, inputs=put(arena, 0))
    answer = peer.ask(3, "block", program="p", sets=[0, 0], keep={}, poison=True)
    assert answer["ok"] and len(answer["result"]["samples_us"]) == 2
    log = peer.log.read_text()
    assert "from C" in log and "to standard error" in log and log.count("straight") == 40_000


def test_resident_memory_of_a_program_is_its_inputs_and_outputs(peer, arena):
    peer.read()
    device = {"kind": "cpu", "name": "test", "arch": "x", "threads": 1, "memory_bytes": 2**30, "features": []}
    peer.ask(1, "prepare", program="p", impl="cheats.honest", case="gemm:2048x2048x2048:f32", device=device)
    for which in (0, 1):
        inputs = {name: arena.array((2048, 2048), "f32")[1] for name in "AB"}
        peer.ask(2, "load", program="p", set=which, inputs=inputs)
    assert peer.ask(3, "block", program="p", sets=[0, 1], keep={}, poison=True)["ok"]
    peak = peer.ask(4, "release", program="p")["result"]["peak_memory_bytes"]
    # Two sets of A, B and C of 16 MiB each; the BLAS library's packing buffers come on top.
    assert 6 * 2**24 <= peak < 6 * 2**24 + 2**27


def test_it_stays_on_the_cpus_it_was_given(tmp_path):
    cpu = max(os.sched_getaffinity(0))
    peer = Peer(tmp_path, cpus=str(cpu))
    try:
        peer.read()
        assert os.sched_getaffinity(peer.process.pid) == {cpu}
    finally:
        peer.close()


def test_it_ends_when_the_harness_closes_its_end(peer):
    peer.read()
    os.close(peer.to_worker)
    peer.to_worker = os.open(os.devnull, os.O_WRONLY)
    assert peer.process.wait(10) == 0


def test_it_does_not_begin_for_a_harness_that_is_gone(tmp_path):
    peer = Peer(tmp_path, parent=1)
    try:
        assert peer.lines.readline() == b""
        assert peer.process.wait(10) == 1
        assert "The harness is gone" in peer.log.read_text()
    finally:
        peer.close()


def test_an_environment_that_lacks_numpy_is_said_in_the_first_line(tmp_path):
    (tmp_path / "numpy.py").write_text("raise ImportError('No module named numpy')\n")
    peer = Peer(tmp_path, path=os.pathsep.join([str(tmp_path), str(stage.ROOT)]))
    try:
        refusal = peer.read()
        assert refusal["ok"] is False and refusal["error"]["kind"] == "failed"
        assert refusal["error"]["message"] == ("The worker of cheats cannot begin: ImportError: No module named numpy")
    finally:
        peer.close()


HARNESS = """
import os, subprocess, sys, time
requests, to_worker = os.pipe()
from_worker, replies = os.pipe()
argv = [sys.executable, "-m", "benchmarks.engine.worker", "--stack", "cheats", "--device", "cpu", "--cpus", "0",
        "--requests", str(requests), "--replies", str(replies), "--parent", str(os.getpid())]
worker = subprocess.Popen(argv, pass_fds=(requests, replies))
os.read(from_worker, 1)
print(worker.pid, flush=True)
time.sleep(600)
"""


def test_it_dies_with_a_killed_harness():
    environ = {**os.environ, "PYTHONPATH": str(stage.ROOT), "RIDGEMARK_EXTRA_STACKS": stage.STACKS}
    harness = subprocess.Popen([sys.executable, "-c", HARNESS], stdout=subprocess.PIPE, text=True, env=environ)
    assert harness.stdout is not None
    worker = int(harness.stdout.readline())
    os.kill(worker, signal.SIGSTOP)  # even while it is held stopped
    harness.kill()
    harness.communicate()
    assert gone(worker)


def gone(pid: int) -> bool:
    """Whether a process ends within ten seconds (a zombie has ended)."""
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False
