"""Arrays shared between the harness and its workers: raw bytes in memory-mapped files, and their descriptors.

Owns the descriptor {path, dtype, shape, strides, offset}, the arena that makes and frees such arrays, and the checked
copy from an implementation's arrays into them. It does not own the folders (scratch) or what the arrays mean.

Files hold raw bytes and the dtype travels by name: ``.npy`` loses bf16 and fp8. Standard library, NumPy and
``impls.workloads`` only: it runs in every stack's environment.
"""

from __future__ import annotations

import errno
import itertools
import math
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine import scratch
from impls.workloads.dtypes import dtype

Descriptor = dict[str, Any]

# What an arena leaves free of a file system: others (NCCL, data loaders) need some of /dev/shm too.
_LEFT_FREE = 0.1
# A page, which is also enough alignment for every library to take an array without a copy (XLA asks for 64 bytes).
_ALIGNMENT = mmap.PAGESIZE
# Threads that copy a GPU's outputs, since one needs six times as long for it as the device; what each takes at a time.
_COPIERS, _PIECE = 8, 8 * 2**20


class NoRoom(Exception):
    """No file system has room for an array; the message says how much was wanted and where to make room."""


class WrongArrays(Exception):
    """Arrays differ in name, shape or dtype from what was asked for; the message is one sentence."""


def view(descriptor: Descriptor) -> np.ndarray:
    """The described array, mapped into this process and writable; the mapping lives as long as the array.

    Raises:
        OSError: the file is gone or cannot be mapped.
        ValueError: the file is smaller than the descriptor says.
        KeyError: the descriptor is incomplete or names no known dtype.
    """
    fd = os.open(descriptor["path"], os.O_RDWR | os.O_CLOEXEC)
    try:
        # Populated at once: a page fault per page would otherwise fall into the copy that follows a timed call.
        mapped = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)
    return np.ndarray(
        tuple(descriptor["shape"]),
        dtype(descriptor["dtype"]).storage,
        buffer=mapped,
        offset=descriptor["offset"],
        strides=tuple(descriptor["strides"]),
    )


# No two files of a process ever have the same name, whatever arena made them: workers keep what they have mapped by it.
_numbers = itertools.count(1)


class Arena:
    """Makes arrays in files and frees them, for any thread; not to be closed while one of them is at it.

    Args:
        label: begins the files' names, for whoever looks into the folder.
    """

    def __init__(self, label: str) -> None:
        if not re.fullmatch(r"[\w.-]+", label):
            raise ValueError(f"{label!r} cannot begin a file's name: use letters, digits, '_', '.' and '-'.")
        self._label = label
        self._files: set[Path] = set()

    def array(self, shape: Sequence[int], dtype_name: str) -> tuple[np.ndarray, Descriptor]:
        """A new C-contiguous array of zeros, and its descriptor. Raises NoRoom as ``place`` does."""
        descriptor = self.place(shape, dtype_name)
        return view(descriptor), descriptor

    def place(self, shape: Sequence[int], dtype_name: str) -> Descriptor:
        """Room for an array of zeros that this process does not look at itself: mapping one takes half a second a GiB.

        Raises:
            NoRoom: it fits neither into shared memory nor into the temporary folder.
        """
        storage = dtype(dtype_name).storage
        shape = tuple(int(n) for n in shape)
        nbytes = math.prod(shape) * storage.itemsize
        path = self._reserve(max(nbytes, 1))
        return {
            "path": str(path),
            "dtype": dtype_name,
            "shape": list(shape),
            "strides": _strides(shape, storage.itemsize),
            "offset": 0,
        }

    def put(self, array: np.ndarray, dtype_name: str) -> Descriptor:
        """A copy of ``array``.

        Raises:
            ValueError: ``array`` is not stored as ``dtype_name`` is: nothing is converted in silence.
            NoRoom: as ``array``.
        """
        storage = dtype(dtype_name).storage
        if array.dtype != storage:
            raise ValueError(f"{dtype_name} is stored as {storage}, not as {array.dtype}: convert the array first.")
        copy, descriptor = self.array(array.shape, dtype_name)
        copy[...] = array
        return descriptor

    def free(self, descriptor: Descriptor) -> None:
        """Give the array's file back. Arrays over it stay usable; its memory goes when the last of them goes.

        Raises:
            ValueError: it is not an array of this arena, or was freed before.
        """
        path = Path(descriptor["path"])
        if path not in self._files:
            raise ValueError(f"{path} is no array of this arena, or was freed before.")
        self._files.remove(path)
        path.unlink(missing_ok=True)

    def close(self) -> None:
        """Free everything."""
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()

    def _reserve(self, nbytes: int) -> Path:
        """A file whose bytes are really there: writing to a sparse one would end in SIGBUS where memory is short."""
        number = next(_numbers)
        looked = []
        for place in scratch.places():
            looked.append(str(place))
            stat = os.statvfs(place)
            if nbytes > stat.f_bavail * stat.f_frsize - _LEFT_FREE * stat.f_blocks * stat.f_frsize:
                continue
            path = scratch.folder(place) / f"{self._label}-{os.getpid()}-{number}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, nbytes)
            except OSError as error:
                path.unlink()
                if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
                    raise
                continue
            finally:
                os.close(fd)
            self._files.add(path)
            return path
        raise NoRoom(
            f"An array of {nbytes / 2**20:,.1f} MiB fits nowhere: make room in {' or '.join(looked) or '/dev/shm'}, "
            "or set TMPDIR to a folder with room."
        )


def _strides(shape: tuple[int, ...], itemsize: int) -> list[int]:
    return [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def own_copy(array: np.ndarray) -> np.ndarray:
    """A private C-contiguous copy that begins on a page boundary, in every process alike.

    NumPy's own arrays begin 16 bytes into a page: a library that wants more alignment would copy them, another would
    not, and the two would be timed on different memory.
    """
    room = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@cache
def copiers() -> Executor:
    """Threads of this process that copy large arrays. Not on a CPU, where they would disturb what is measured."""
    return ThreadPoolExecutor(_COPIERS, "ridgemark-copy")


def copy_into(
    into: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray], copiers: Executor | None = None
) -> None:
    """Copy arrays by name, each into one of the same shape and dtype; large ones by the threads of ``copiers``.

    Raises WrongArrays as ``alike`` does.
    """
    alike(into, arrays)
    for name, target in into.items():
        if (
            copiers is None
            or target.nbytes < 2 * _PIECE
            or not (target.flags.c_contiguous and arrays[name].flags.c_contiguous)
        ):
            np.copyto(target, arrays[name])
            continue
        to, source = (a.reshape(-1).view(np.uint8) for a in (target, arrays[name]))
        pieces = [slice(at, at + _PIECE) for at in range(0, to.size, _PIECE)]
        list(copiers.map(np.copyto, [to[piece] for piece in pieces], [source[piece] for piece in pieces]))


def differing(one: np.ndarray, other: np.ndarray, copiers: Executor | None = None) -> int:
    """How many bytes of two arrays of the same shape and dtype differ; large ones are looked at by ``copiers``."""
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (one, other))
    pieces = [slice(at, at + _PIECE) for at in range(0, a.size, _PIECE)]
    return sum((map if copiers is None else copiers.map)(_differing, [a[p] for p in pieces], [b[p] for p in pieces]))


def _differing(one: np.ndarray, other: np.ndarray) -> int:
    """Of two arrays of bytes. Word by word is a few times faster, and most are equal."""
    words = one.size // 8 * 8
    equal = np.array_equal(one[:words].view(np.uint64), other[:words].view(np.uint64))
    return 0 if equal and np.array_equal(one[words:], other[words:]) else int(np.count_nonzero(one != other))


def alike(into: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray]) -> None:
    """Whether ``arrays`` have the names, shapes and dtypes of ``into``.

    Raises:
        WrongArrays: a name is missing or too many, or a shape or dtype differs.
    """
    if set(arrays) != set(into):
        raise WrongArrays(f"It gave {', '.join(sorted(arrays)) or 'nothing'}, not {', '.join(sorted(into))}.")
    for name, target in into.items():
        array = arrays[name]
        if not isinstance(array, np.ndarray):
            raise WrongArrays(f"It gave {name} as {type(array).__name__}, not as a NumPy array.")
        if array.shape != target.shape or array.dtype != target.dtype:
            raise WrongArrays(
                f"It gave {name} as {array.dtype}{list(array.shape)}, not as {target.dtype}{list(target.shape)}."
            )
