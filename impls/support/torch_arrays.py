"""NumPy <-> torch, every dtype of the workloads, bit for bit, without a copy on the CPU.

Owns the conversion and nothing else. It imports torch: implementations import it inside ``prepare`` (or later), never
at module level.
"""

from __future__ import annotations

import numpy as np
import torch

from impls.workloads.dtypes import dtype

_TORCH = {
    "f64": torch.float64,
    "f32": torch.float32,
    # tf32 is stored as f32 whose low significand bits are zero.
    "tf32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "i8": torch.int8,
    "i32": torch.int32,
}
# NumPy knows bf16 and fp8 only as extension types, which torch's bridge refuses: the bits cross as integers.
# torch dtype -> (torch dtype of the same width, NumPy's, the storage of the workloads).
_BITS: dict[torch.dtype, tuple[torch.dtype, np.dtype, np.dtype]] = {
    torch.bfloat16: (torch.int16, np.dtype(np.int16), dtype("bf16").storage),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(np.uint8), dtype("f8e4m3").storage),
}
# Pinned memory is kept for good, and a GiB of it takes half a second to make: a tensor that is larger goes without.
_PINNED_BYTES = 512 * 2**20
_EXTENSION_TYPES = {storage: kind for kind, (_, _, storage) in _BITS.items()}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype that stores dtype ``name`` of the workloads.

    Raises:
        KeyError: no such dtype; the message lists the known names.
    """
    return _TORCH[dtype(name).name]


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A CPU tensor over the array's memory: any strides that are not negative, the same bits.

    Raises:
        TypeError: torch has no such dtype.
        ValueError: a stride is negative.
    """
    kind = _EXTENSION_TYPES.get(array.dtype)
    if kind is None:
        return torch.from_numpy(array)
    _, bits, _ = _BITS[kind]
    return torch.from_numpy(array.view(bits)).view(kind)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as an array with the same bits: over its memory where it lies on the CPU, else a copy.

    The copy is in pinned memory, which torch keeps for the next one: fresh pages would cost ten times the transfer.
    """
    host = tensor.detach()
    if host.is_cuda:
        host = torch.empty(host.shape, dtype=host.dtype, pin_memory=host.nbytes <= _PINNED_BYTES).copy_(host)
    if host.dtype not in _BITS:
        array: np.ndarray = host.numpy()
        return array
    bits, _, storage = _BITS[host.dtype]
    array = host.view(bits).numpy()
    return array.view(storage)


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, integers with the least value: what an element looks like that was never written.

    f8e4m3's NaN has all bits but the sign set (OCP 8-bit floating point rev. 1.0).
    """
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0x7F)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
