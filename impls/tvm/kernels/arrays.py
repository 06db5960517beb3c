"""NumPy arrays under TVM's hands, without a copy: bf16 and f8e4m3 as the integers that hold their bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tvm

# What TVM's compiled code takes for granted of every argument.
_ALIGNMENT = 64
_BITS = {2: np.dtype(np.uint16), 1: np.dtype(np.uint8)}


def aligned(array: np.ndarray) -> bool:
    """Whether TVM may take ``array`` as it lies in memory."""
    return array.flags.c_contiguous and array.ctypes.data % _ALIGNMENT == 0


def empty(shape: tuple[int, ...], storage: np.dtype) -> np.ndarray:
    """An aligned array of arbitrary contents."""
    size = int(np.prod(shape)) * storage.itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size].view(storage).reshape(shape)


def copied(array: np.ndarray) -> np.ndarray:
    """An aligned copy."""
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def update(held: Mapping[str, np.ndarray], given: Mapping[str, np.ndarray]) -> None:
    """New contents for what is a copy of ``given``."""
    for name, array in held.items():
        if array is not given[name]:
            array[...] = given[name]


def tensor(array: np.ndarray) -> tvm.runtime.Tensor:
    """A TVM tensor over the array's memory.

    Raises:
        ValueError: the array is not aligned, or not contiguous.
    """
    if not aligned(array):
        raise ValueError(f"TVM takes contiguous arrays at addresses that are multiples of {_ALIGNMENT} only.")
    if array.dtype.kind == "V":  # an extension type, which DLPack between NumPy and TVM does not carry
        array = array.view(_BITS[array.dtype.itemsize])
    return tvm.runtime.from_dlpack(array)


def words(array: np.ndarray) -> tvm.runtime.Tensor:
    """As ``tensor``, of 32-bit words of several elements of the last axis."""
    return tensor(array.view(np.int32))


def typed(array: np.ndarray) -> tvm.runtime.Tensor:
    """As ``tensor``, with the dtype that TVM has for the array's own."""
    plain = tensor(array)
    name = {"bfloat16": "bfloat16", "float8_e4m3fn": "float8_e4m3fn"}.get(array.dtype.name)
    return plain if name is None else plain._create_view(array.shape, name)


def to_numpy(result: tvm.runtime.Tensor, storage: np.dtype) -> np.ndarray:
    """A copy of a tensor's contents, in the storage dtype of the workload's."""
    copy = result.numpy()
    return copy if copy.dtype == storage else copy.view(storage)


def poison(array: np.ndarray) -> None:
    """Fill with NaN, integers with the least value."""
    array.fill(np.iinfo(array.dtype).min if array.dtype.kind == "i" else np.nan)
