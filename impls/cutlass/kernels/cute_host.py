"""Host functions of the CuTe DSL, compiled beforehand: where they lie, how they are built, loaded and called.

The DSL is half a gigabyte that a GPU node need not have. Where it is installed, ``build`` traces a kernel for sm_90a
without a GPU and links what it exports with the 50 KB of NVIDIA's runtime that load a module and launch it; a node
calls the library's host function over raw pointers, sizes and a stream. A library is named for the sources and the
tiles that it came from; ``python -m impls.cutlass.compile_attention CASE ...`` and ``compile_gemm`` build those of
cases.

Owns libraries and calls; kernels own what is traced and in which order their arguments come. Imports neither the DSL
nor torch at module level.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from impls.contract import Unsupported
from impls.cutlass.cute_attention import BackwardTiles, DecodeTiles, ForwardTiles

# What the kernels are written against; its version is part of a library's name, for generated code changes with it.
DSL = "nvidia-cutlass-dsl"
DSL_VERSION = "4.8.1"
ARCH = "sm_90a"
# The prefix of all symbols of a library.
_PREFIX = "ridgemark"
_SOURCES = (
    "cute_attention.py",
    "kernels/cute_attention.py",
    "kernels/cute_attention_backward.py",
    "kernels/cute_attention_operands.py",
    "kernels/cute_attention_softmax.py",
    "kernels/cute_decode.py",
    "kernels/cute_tma.py",
)

Argument = ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float


def folder() -> Path:
    """Where libraries are kept, beside those of the C++ kernels: ``cutlass`` in RIDGEMARK_CACHE or the user's cache."""
    named = os.environ.get("RIDGEMARK_CACHE")
    base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ridgemark"
    return base.absolute() / "cutlass"


def library(tiles: Any) -> Path:
    """The library of these tiles, whether or not it is there; ``.json`` beside it says how it came about."""
    digest = hashlib.sha256(f"{DSL_VERSION} {ARCH} {tiles!r}".encode())
    for source in getattr(tiles, "sources", _SOURCES):
        digest.update((Path(__file__).parents[1] / source).read_bytes())
    return folder() / f"{type(tiles).__name__}-{digest.hexdigest()[:16]}.so"


def found(tiles: Any, kernel: Callable[[], Any] | None = None) -> Path:
    """The library of these tiles, built where it is missing and the DSL is installed.

    Args:
        kernel: makes what ``build`` takes; it may import the DSL. Attention's own where it is left out.

    Raises:
        Unsupported: it is missing, and so is the DSL.
    """
    path = library(tiles)
    if path.is_file():
        return path
    # The DSL writes PTX and cubin, which are kept with the library, into a folder as well; it is read on import.
    os.environ.setdefault("CUTE_DSL_DUMP_DIR", _dumps().name)
    try:
        import cutlass  # noqa: F401
    except ImportError as error:
        module = "compile_gemm" if kernel else "compile_attention"
        raise Unsupported(
            f"{path.name} of the CuTe DSL is not in {path.parent}, and {DSL} {DSL_VERSION} that compiles it is not "
            f"installed: run python -m impls.cutlass.{module} with this case where it is, and copy the folder."
        ) from error
    build(path, kernel() if kernel else _kernel(tiles), repr(tiles))
    return path


def _kernel(tiles: Any) -> Any:
    """What ``build`` takes, for these tiles."""
    from impls.cutlass.kernels import cute_attention, cute_attention_backward, cute_decode

    kernels = {
        ForwardTiles: cute_attention.Forward,
        DecodeTiles: cute_decode.Decode,
        BackwardTiles: cute_attention_backward.Backward,
    }
    return kernels[type(tiles)](tiles)


def build(path: Path, kernel: Any, description: str) -> None:
    """Compiles a kernel into the library ``path``, with its cubin and a description beside it.

    Args:
        kernel: has a host function under ``cute.jit`` as its call, and the arguments to trace it with, but for the
            stream, as ``examples``.

    Raises:
        RuntimeError: the linker failed.
    """
    from importlib import metadata

    import cuda.bindings.driver as cuda
    import cutlass
    from cutlass import cute

    from impls.support import machine_code

    runtime = Path(cutlass.__file__).parents[2] / "cu13" / "lib"
    # Exporting resolves the runtime's symbols in this process.
    ctypes.CDLL(str(runtime / "libcute_dsl_runtime.so"), mode=ctypes.RTLD_GLOBAL)
    begin = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        compiled = cute.compile(
            kernel, *kernel.examples(), cuda.CUstream(0), options=f"--gpu-arch {ARCH} --keep-ptx --keep-cubin"
        )
        compiled.export_to_c(scratch, "host", _PREFIX)
        parts = [str(Path(scratch) / "host.o"), str(runtime / "libcuda_dialect_runtime_static.a")]
        linked = Path(scratch) / "host.so"
        command = ["gcc", "-shared", "-s", "-o", linked, *parts]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"gcc does not link {path.name}: {done.stderr.strip()}")
        path.with_suffix(".cubin").write_bytes(compiled.artifacts.CUBIN)
        facts = {
            "tiles": description,
            "compile_s": round(time.monotonic() - begin, 2),
            "versions": {DSL: metadata.version(DSL)},
            "ptx": machine_code.of_ptx(compiled.artifacts.PTX),
        }
        path.with_suffix(".json").write_text(json.dumps(facts, indent=1))
        linked.replace(path)  # last: whoever finds it finds the others


@cache
def _dumps() -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="ridgemark-cute-")


class Host:
    """A library's host function, loaded: its module is on the device from here on.

    Raises:
        RuntimeError: CUDA does not load it.
    """

    def __init__(self, path: Path) -> None:
        _load_cuda_runtime()
        self._library = ctypes.CDLL(str(path))
        symbol = re.search(rb"\x00(_mlir_%s__mlir_ciface_[^\x00]+)\x00" % _PREFIX.encode(), path.read_bytes())
        assert symbol is not None, f"{path} has no host function"
        self._function: Callable[..., Any] = getattr(self._library, symbol[1].decode())
        self._module = ctypes.c_void_p()
        module = ctypes.c_void_p(ctypes.addressof(self._module))
        device, status = ctypes.c_int32(0), ctypes.c_int32(0)
        getattr(self._library, f"_mlir_{_PREFIX}_cuda_init")(_addresses(module, status))
        if status.value == 0:
            getattr(self._library, f"_mlir_{_PREFIX}_cuda_load_to_device")(_addresses(module, device, status))
        if status.value:
            raise RuntimeError(f"CUDA does not load {path.name}: error {status.value}")

    def bind(self, arguments: Sequence[Argument], stream: int) -> Callable[[], None]:
        """A call with these arguments, on the CUDA stream at this address; it raises RuntimeError where CUDA fails."""
        status = ctypes.c_int32(0)
        held = (*arguments, ctypes.c_void_p(stream), status)
        addresses = _addresses(*held)
        function, count = self._function, len(held)

        def call() -> None:
            function(addresses, count)
            if status.value:
                raise RuntimeError(f"CUDA does not launch the kernel: error {status.value}")

        call.held = held  # type: ignore[attr-defined]  # alive as long as their addresses
        return call


@cache
def _load_cuda_runtime() -> None:
    """The libraries find the CUDA runtime among the symbols of the process; torch brings one."""
    try:
        ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise RuntimeError("There is no CUDA 13 runtime in this process: import torch for CUDA 13 before.") from error


def _addresses(*values: Argument) -> Any:
    return (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
