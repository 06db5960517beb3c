"""Runs a library's host code without a GPU and keeps what it launches. Needs the library and CUTLASS' CuTe DSL.

Owns the recording: tensors are torch's fake ones (shape, strides, storage; no memory), ``cute.compile`` is watched,
what it compiles is exported and linked into a library named for its contents, and what it returns writes its calls down
instead of launching. Operators of torch that compute or write, but for allocations and zeros, are refused: a recording
must be the whole of the call. It does not own which library is called how.

The compiled object needs two runtimes: TVM FFI's, a small package, and CUTLASS' own, of which NVIDIA ships the part
that loads and launches as a static library of 50 KB; it is linked in, so that the node needs nothing of the DSL.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cutlass
import torch
import tvm_ffi
from cutlass import cute
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from impls.incumbents.kernels import recording
from impls.incumbents.kernels.recording import FUNCTION, Recording, Step
from impls.support.torch_arrays import torch_dtype
from impls.workloads.dtypes import DTYPES

_ALLOCATE = {"aten::empty.memory_format", "aten::empty_strided", "aten::empty_like", "aten::new_empty"}
_ZEROS = {"aten::zeros", "aten::zeros_like", "aten::new_zeros"}
# Our names of torch's dtypes; what tf32 and f32 share is called f32.
_NAMES = {torch_dtype(name): name for name in reversed(DTYPES) if name != "tf32"}

# What the exported code calls where a launch fails. CUTLASS keeps these two in its large library, beside the compiler;
# the first argument is TVM FFI's own function for raising an error from strings.
_ERRORS = """
#include <stdio.h>
typedef void (*Raise)(const char *, const char **, int);
const char *cudaGetErrorString(int);
void CuteDSLRT_TVMFFISetRaisedCudaError(Raise raise, int code) {
  const char *parts[] = {"CUDA error: ", cudaGetErrorString(code)};
  if (raise) raise("RuntimeError", parts, 2);
}
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(Raise raise, int code) {
  CuteDSLRT_TVMFFISetRaisedCudaError(raise, code);
}
"""


class Unrecordable(RuntimeError):
    """The host code does something that a recording cannot hold; the message says what."""


class _Watch(TorchDispatchMode):
    """Sees every operator of torch: allocations become buffers, zeros become steps."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name + (f".{func._schema.overload_name}" if func._schema.overload_name else "")
        if name == "aten::zero_" or (name == "aten::fill_.Scalar" and args[1] == 0):
            self._call.zero(args[0])
        elif func._schema.is_mutable:
            raise Unrecordable(f"{name} writes to a tensor.")
        elif isinstance(result, torch.Tensor) and not self._call.knows(result):
            if name not in _ALLOCATE | _ZEROS:
                raise Unrecordable(f"{name} computes a tensor.")
            self._call.allocate(result)
            if name in _ZEROS:
                self._call.zero(result)
        return result


class Call:
    """What one call of the library did so far."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._used: list[dict[str, Any]] = []
        self._buffers: list[dict[str, Any]] = []
        # Kept alive: a freed storage's address would be given to the next.
        self._storages: dict[int, tuple[int, torch.Tensor]] = {}
        self._steps: list[Step] = []
        self._before: list[Step] = []

    def named(self, name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """An input or output, contiguous on the device."""
        tensor = torch.empty(shape, dtype=torch_dtype(dtype), device="cuda")
        self._buffers[self._storages[tensor.untyped_storage()._cdata][0]]["name"] = name
        return tensor

    def rename(self, tensor: torch.Tensor, name: str) -> None:
        """What the library allocated is an output."""
        self._buffers[self._storages[tensor.untyped_storage()._cdata][0]]["name"] = name

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in a buffer of this call."""
        return tensor.untyped_storage()._cdata in self._storages

    def allocate(self, tensor: torch.Tensor) -> None:
        """A new buffer."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = len(self._buffers), tensor
        self._buffers.append({"name": None, "bytes": int(storage.nbytes())})

    def zero(self, tensor: torch.Tensor) -> None:
        """A fill."""
        self._steps.append({"zero": self._argument(tensor)})

    def launch(self, kernel: dict[str, Any], arguments: tuple[Any, ...]) -> None:
        """A launch of a compiled kernel."""
        if kernel not in self._used:
            self._used.append(kernel)
        step = {"launch": self._used.index(kernel), "arguments": [self._argument(a) for a in arguments]}
        self._steps.append(step)

    def prepared(self) -> None:
        """What was done so far is no part of the case: it runs once per set of inputs."""
        self._before, self._steps = self._before + self._steps, []

    def recording(self, choice: dict[str, Any] | None) -> Recording:
        """All of it."""
        return Recording(choice, self._used, self._buffers, self._before, self._steps)

    def _argument(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, torch.Tensor):
            if not self.knows(value):
                raise Unrecordable("A kernel is given a tensor from outside the call.")
            return {
                "buffer": self._storages[value.untyped_storage()._cdata][0],
                "dtype": _NAMES[value.dtype],
                "shape": [int(n) for n in value.shape],
                "strides": [int(n) for n in value.stride()],
                "offset": int(value.storage_offset()),
            }
        if isinstance(value, tuple | list):
            return [self._argument(v) for v in value]
        if isinstance(value, cutlass.Int32 | cutlass.Float32):
            return value.value
        raise Unrecordable(f"A kernel is given a {type(value).__name__}.")


class Kernels:
    """Everything compiled so far, as libraries named for their contents."""

    def __init__(self) -> None:
        self.compile_s: dict[str, float] = {}
        self._call: Call | None = None
        recording.folder().mkdir(parents=True, exist_ok=True)

    @contextmanager
    def recording(self) -> Iterator[Call]:
        """A call being recorded: within it, every tensor is fake and nothing is launched."""
        self._call = Call(self)
        try:
            with FakeTensorMode(), _Watch(self._call):
                yield self._call
        finally:
            self._call = None

    def watch(self) -> None:
        """From now on ``cute.compile`` exports what it compiles, and what it returns records its calls."""
        compile_: Any = cute.compile

        def compiled(function: Any, *arguments: Any, **options: Any) -> Callable[..., None]:
            begin = time.monotonic()
            # The call's own tensors are looked at, not computed with.
            library = self._link(compile_(function, *arguments, **options))
            self.compile_s[library] = round(time.monotonic() - begin, 2)
            kernel = {"library": library, "class": type(function).__name__, "attributes": _attributes(function)}
            return lambda *values: self._launch(kernel, values)

        cute.compile = compiled

    def _launch(self, kernel: dict[str, Any], values: tuple[Any, ...]) -> None:
        if self._call is None:
            raise Unrecordable("A kernel is launched outside a recording.")
        self._call.launch(kernel, values)

    def _link(self, kernel: Any) -> str:
        """The library's name: the first 16 hex digits of the SHA-256 of the exported object."""
        [static] = Path(cutlass.__file__).parents[2].glob("cu13/lib/libcuda_dialect_runtime_static.a")
        ffi = Path(tvm_ffi.__file__).parent / "lib"
        with tempfile.TemporaryDirectory() as scratch:
            code, errors = Path(scratch) / "kernel.o", Path(scratch) / "errors.c"
            kernel.export_to_c(object_file_path=str(code), function_name=FUNCTION)
            errors.write_text(_ERRORS)
            name = hashlib.sha256(code.read_bytes()).hexdigest()[:16]
            library = recording.library(name)
            if not library.exists():
                # Every library has its own copy of the runtime: none may bind to another's.
                command = ["gcc", "-shared", "-fPIC", "-O1", "-s", "-Wl,-Bsymbolic", "-o", f"{library}.new"]
                command += [str(code), str(errors), str(static), f"-L{ffi}", "-ltvm_ffi", *_cudart()]
                subprocess.run(command, check=True, capture_output=True, text=True)
                Path(f"{library}.new").replace(library)
        return name


def _cudart() -> list[str]:
    """Linker's arguments for the CUDA runtime of the toolkit that is installed here."""
    from shutil import which

    places = [Path("/usr/local/cuda/lib64")]
    if nvcc := which("nvcc"):
        places.insert(0, Path(nvcc).resolve().parents[1] / "lib64")
    for place in places:
        if (place / "libcudart.so").exists():
            return [f"-L{place}", "-lcudart"]
    raise Unrecordable("There is no libcudart.so beside nvcc: install the CUDA toolkit.")


def _attributes(kernel: Any) -> dict[str, Any]:
    """What of a kernel's object says how it was configured: numbers, words, tuples of them."""

    def plain(value: Any) -> bool:
        return isinstance(value, bool | int | float | str) or (isinstance(value, tuple) and all(map(plain, value)))

    return {k: v for k, v in vars(kernel).items() if plain(v)} if hasattr(kernel, "__dict__") else {}
