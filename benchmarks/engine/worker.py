"""A stack's worker process: takes its place, greets, answers requests over two pipes.

Owns how the process behaves towards the harness and the system. It does not own what the requests mean (operations).
Standard output and error are the worker's log: libraries may write what they like.

    python -m benchmarks.engine.worker --stack xla --device cpu --cpus 0,1 --requests 5 --replies 6 --parent 4711
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import os
import platform
import signal
import sys
import tomllib
import traceback
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from benchmarks.engine import protocol

if TYPE_CHECKING:
    from benchmarks.engine.operations import Operations

# prctl(2).
_PR_SET_PDEATHSIG = 1
# The kernel's out-of-memory killer takes the highest score (proc_pid_oom_score_adj(5)): a worker, not the harness.
_OOM_SCORE_ADJ = "800"


def serve(operations: Operations, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests, one after the other, until shutdown or until the harness closes its end."""
    for line in requests:
        message = protocol.decode(line)
        reply = operations.reply(message)
        try:
            encoded = protocol.encode(reply)
        except protocol.ProtocolError as error:
            told = f"{message['op']} gave what cannot be reported. {error}"
            encoded = protocol.encode(protocol.error(message["id"], "failed", told, ""))
        replies.write(encoded)
        replies.flush()
        if message["op"] == "shutdown":
            return


def reported_versions(stack: str, device: str) -> dict[str, str]:
    """Versions by distribution: NumPy's, and those that the stack's ``env.toml`` wants in the record."""
    from impls import registry

    sections = tomllib.loads((registry.stacks()[stack] / "env.toml").read_text(encoding="utf-8"))
    versions = {}
    for name in dict.fromkeys([*sections.get(device, {}).get("report", []), "numpy"]):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _take_place(cpus: str, parent: int) -> None:
    """Affinity, death with the harness, and the first place in the queue when memory runs out."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the call above
        sys.exit("The harness is gone.")
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ)
    # Before the stack is imported: thread pools look at the affinity once.
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})


def main(argv: list[str] | None = None) -> None:
    """Greet, then serve."""
    parser = argparse.ArgumentParser(description="A stack's worker; the harness starts it.")
    parser.add_argument("--stack", required=True)
    parser.add_argument("--device", required=True, help="kind of device, as in the stack's env.toml")
    parser.add_argument("--cpus", required=True, help="affinity: CPU numbers separated by commas")
    parser.add_argument("--requests", required=True, type=int, help="descriptor that requests come from")
    parser.add_argument("--replies", required=True, type=int, help="descriptor that replies go to")
    parser.add_argument("--parent", required=True, type=int, help="the harness's process")
    options = parser.parse_args(argv)
    for descriptor in (options.requests, options.replies):
        os.set_inheritable(descriptor, False)  # what a stack starts must not hold the pipes open
    _take_place(options.cpus, options.parent)
    with open(options.requests, "rb") as requests, open(options.replies, "wb") as replies:
        try:
            # Here and not at the top, so that an environment without NumPy can still say what it lacks.
            operations = importlib.import_module("benchmarks.engine.operations").Operations()
            versions = reported_versions(options.stack, options.device)
        except Exception as error:
            told = f"The worker of {options.stack} cannot begin: {type(error).__name__}: {error}"
            replies.write(protocol.encode(protocol.error(0, "failed", told, traceback.format_exc())))
            return
        greeting = protocol.handshake(options.stack, platform.python_version(), os.getpid(), versions)
        replies.write(protocol.encode(greeting))
        replies.flush()
        serve(operations, requests, replies)


if __name__ == "__main__":
    main()
