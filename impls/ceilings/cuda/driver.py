"""The CUDA driver for the probes: compile, allocate, copy, launch. cuda-bindings only.

Owns the context (the primary one, which all libraries of a process share) and the life of what is allocated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from cuda.bindings import driver, nvrtc


class CudaError(RuntimeError):
    """A CUDA call failed; the message says which status it gave."""


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a cuda-bindings call. Raises CudaError where it did not succeed."""
    status, *values = result
    if int(status) != 0:
        raise CudaError(f"CUDA says {getattr(status, 'name', status)}.")
    return values[0] if len(values) == 1 else (tuple(values) or None)


@cache
def device() -> Any:
    """The first visible GPU; its primary context is current afterwards."""
    checked(driver.cuInit(0))
    found = checked(driver.cuDeviceGet(0))
    checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(found))))
    return found


def multiprocessors() -> int:
    """How many there are."""
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    return int(checked(driver.cuDeviceGetAttribute(attribute, device())))


def synchronize() -> None:
    """Wait until the device is idle."""
    checked(driver.cuCtxSynchronize())


class Buffer:
    """Device memory, freed with the object."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = int(checked(driver.cuMemAlloc(nbytes)))

    def write(self, array: np.ndarray) -> None:
        """Copy from the host."""
        array = np.ascontiguousarray(array)
        checked(driver.cuMemcpyHtoD(self.address, array.ctypes.data, array.nbytes))

    def read(self, array: np.ndarray) -> np.ndarray:
        """Copy to the host, into ``array``."""
        checked(driver.cuMemcpyDtoH(array.ctypes.data, self.address, array.nbytes))
        return array

    def fill(self, word: int) -> None:
        """Every 32-bit word."""
        checked(driver.cuMemsetD32(self.address, word & 0xFFFFFFFF, self.nbytes // 4))

    def __del__(self) -> None:
        if hasattr(self, "address"):
            driver.cuMemFree(self.address)


class Kernel:
    """One kernel of a source text.

    Args:
        source: CUDA C++.
        name: of an ``extern "C"`` kernel in it.
        arch: ``sm_90a``; the a for instructions of this architecture alone.
        shared: bytes of dynamic shared memory.
    """

    def __init__(self, source: str, name: str, arch: str, shared: int = 0) -> None:
        device()
        program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"probe.cu", 0, [], []))
        options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
        status, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(status) != 0:
            log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
            checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise CudaError(f"{name} does not compile: {log.decode(errors='replace').strip()}")
        cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
        checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        self._image = np.frombuffer(cubin, np.uint8)
        module = checked(driver.cuModuleLoadData(self._image.ctypes.data))
        self._function = checked(driver.cuModuleGetFunction(module, name.encode()))
        self._shared = shared
        if shared > 48 << 10:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(self._function, attribute, shared))

    def bound(self, grid: int, block: int, arguments: Sequence[int]) -> Any:
        """A function that launches it on the default stream with these arguments, each of 64 bits."""
        values = [ctypes.c_uint64(a) for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        function, shared, launch = self._function, self._shared, driver.cuLaunchKernel

        def call() -> None:
            checked(launch(function, grid, 1, 1, block, 1, 1, shared, 0, ctypes.addressof(pointers), 0))

        call.keeps = (values, pointers)  # type: ignore[attr-defined]
        return call
