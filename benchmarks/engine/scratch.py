"""Folders that belong to this run alone: one in shared memory, one in the temporary folder.

Owns their creation, their removal at exit and the removal of those that a killed run left behind. What lies in them
belongs to others (buffers, pool). Linux only; standard library only.

A run holds an advisory lock (flock(2)) on the file ``owner`` in each of its folders. The kernel lets go of it when the
process dies, however it dies, so a folder whose lock can be had is stale. Unlike a recorded pid this cannot be fooled
by a pid's reuse or by another container that shares /dev/shm.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

_PREFIX = "ridgemark-"
_OWNER = "owner"

#: Names this run, in its folders and in the environment of its processes.
RUN = f"{_PREFIX}{secrets.token_hex(6)}"

_held: dict[Path, int] = {}
_born = os.getpid()


def places() -> list[Path]:
    """Where run folders may lie, the fastest first: shared memory where there is some, and the temporary folder."""
    found = []
    for place in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
            found.append(place)
    return found


def folder(place: Path) -> Path:
    """This run's folder in ``place``, made on the first call.

    Raises:
        OSError: it cannot be made.
    """
    home = place / RUN
    if home not in _held:
        # Made under a name that no sweep looks at, so that it is never seen without its lock.
        unseen = place / f".{RUN}"
        unseen.mkdir(mode=0o700)
        lock = os.open(unseen / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        unseen.rename(home)
        if not _held:
            atexit.register(remove)
        _held[home] = lock
    return home


def remove() -> None:
    """Remove this run's folders. Called at exit; a forked child removes nothing of its parent's."""
    if os.getpid() != _born:
        return
    for home, lock in list(_held.items()):
        shutil.rmtree(home, ignore_errors=True)
        os.close(lock)
        del _held[home]


def sweep() -> list[str]:
    """Remove the folders of runs that are gone.

    Returns:
        The names of those runs.
    """
    gone = set()
    for place in places():
        for home in place.glob(f"{_PREFIX}*"):
            try:
                lock = os.open(home / _OWNER, os.O_RDWR | os.O_CLOEXEC)
            except OSError:  # another user's, or being removed by its owner
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # its owner lives
            else:
                shutil.rmtree(home, ignore_errors=True)
                gone.add(home.name)
            finally:
                os.close(lock)
    return sorted(gone)
