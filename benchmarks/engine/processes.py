"""Questions about processes that the standard library does not answer, for the pool: who belongs to a worker, how much
memory they hold, what an exit means. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil

#: Variable that a worker and all it starts carry in their environment; its value names the run and the worker.
MARK = "RIDGEMARK_WORKER"


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty where it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def resident_bytes(processes: list[psutil.Process]) -> int:
    """Sum of their resident memory; pages that they share count for each."""
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.Error:  # gone meanwhile, or not ours to look at
            continue
    return total


def kill_marked(mark: str) -> None:
    """Kill every process of this user whose ``MARK`` begins with ``mark``, whatever group or session it moved to.

    A process that emptied its environment at exec is not found.
    """
    wanted = f"{MARK}={mark}".encode()
    for _ in range(5):  # again, where one started another meanwhile
        found = [pid for pid in psutil.pids() if pid != os.getpid() and _carries(pid, wanted)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _carries(pid: int, wanted: bytes) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's
        return False
    return any(entry.startswith(wanted) for entry in environ.split(b"\0"))


def describe_exit(returncode: int) -> str:
    """What ``Popen.returncode`` means: ``was killed by SIGSEGV``, ``exited with code 3``."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
