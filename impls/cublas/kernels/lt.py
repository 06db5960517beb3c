"""cuBLASLt through ctypes: one matrix product with its epilogue, its candidates, its launch.

Owns descriptors and their lifetime. Constants are those of cublasLt.h and library_types.h of CUDA 13. It knows nothing
of cases: ``gemm`` says what is multiplied. Python packages that wrap cuBLASLt were not taken: nvmath-python 1.0 holds
the whole of it too, but has to be carried to nodes whose system Python lacks it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

# cudaDataType_t and cublasComputeType_t by dtype name and accumulation.
DATA = {"f32": 0, "tf32": 0, "f16": 2, "bf16": 14, "f8e4m3": 28, "i8": 3, "i32": 10}
_COMPUTE_16F, _COMPUTE_32F, _COMPUTE_TF32, _COMPUTE_32I = 64, 68, 77, 72
EPILOGUE = {"none": 1, "bias": 4, "bias+relu": 2 | 4, "bias+gelu": 32 | 4, "residual": 1}

_DESC_TRANSA, _DESC_TRANSB, _DESC_EPILOGUE, _DESC_BIAS, _DESC_FAST_ACCUM, _DESC_BIAS_TYPE = 3, 4, 7, 8, 25, 26
_LAYOUT_BATCH, _LAYOUT_STRIDE = 5, 6
_PREF_WORKSPACE, _PREF_REDUCTIONS = 1, 3
# Of the ways to add up a split K: not in the output's type, in place (1) or in the workspace (4).
_REDUCTION_IN_COMPUTE_TYPE = 2
_CONFIG = {"id": 0, "tile": 1, "split_k": 2, "reduction": 3, "swizzle": 4, "custom": 5, "stages": 6, "cluster": 8}
#: cuBLAS Library User Guide, cublasSetWorkspace: 32 MiB on Hopper and Blackwell.
WORKSPACE_BYTES = 32 * 2**20


class CublasError(RuntimeError):
    """A call of cuBLASLt failed; the message names it and its status."""


class _Algo(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algo", _Algo),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Matrix:
    """A column-major matrix, or a batch of them: rows, columns, leading dimension, elements between two of a batch."""

    dtype: str
    rows: int
    columns: int
    ld: int
    stride: int = 0


@dataclass(frozen=True)
class Problem:
    """D = epilogue(op(A) op(B) [+ C]), all column-major.

    Attributes:
        a, b, d: the matrices as they are stored; C is like D.
        transpose_a, transpose_b: whether op transposes.
        batch: products of a strided batch.
        acc: ``f32``, ``f16``, ``i32`` or ``fast`` (f8 accumulated in the tensor core alone).
        epilogue: a key of ``EPILOGUE``; a bias has D's rows, a residual is C.
    """

    a: Matrix
    b: Matrix
    d: Matrix
    transpose_a: bool
    transpose_b: bool
    batch: int
    acc: str
    epilogue: str


@dataclass(frozen=True)
class Candidate:
    """One algorithm for a problem: cuBLASLt's opaque description as hex digits, and the workspace it wants.

    Attributes:
        algo, workspace: as described.
        rank: its place in the heuristic's order.
    """

    algo: str
    workspace: int
    rank: int = 0

    def config(self) -> dict[str, Any]:
        """As a tuned file keeps it: what ``of`` reads, and what the description says of itself."""
        return {"algo": self.algo, "workspace": self.workspace, "rank": self.rank} | self.described()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Candidate:
        """Back from ``config``."""
        return cls(config["algo"], config["workspace"], config["rank"])

    def described(self) -> dict[str, int]:
        """What the description says of itself, as far as cublasLtMatmulAlgoConfigGetAttribute tells.

        A ``split_k`` of -1 is the library's own balancing of pieces of K.
        """
        algo = _algo(self.algo)
        found = {}
        for name, attribute in _CONFIG.items():
            # Attributes are of two or four bytes; a short one fills the low half.
            value, written = ctypes.c_int32(0), ctypes.c_size_t(0)
            for size in (4, 2):
                if not _library().cublasLtMatmulAlgoConfigGetAttribute(
                    ctypes.byref(algo), attribute, ctypes.byref(value), ctypes.c_size_t(size), ctypes.byref(written)
                ):
                    found[name] = value.value
                    break
        return found


def _algo(digits: str) -> _Algo:
    return _Algo.from_buffer_copy(bytes.fromhex(digits))


@cache
def _library() -> ctypes.CDLL:
    """The library that torch has loaded; where it has none yet, the one of the package nvidia-cublas."""
    try:
        return ctypes.CDLL("libcublasLt.so.13")
    except OSError:
        files = metadata.files("nvidia-cublas") or ()
        found = next((f.locate() for f in files if f.name == "libcublasLt.so.13"), None)
        if found is None:
            raise
        return ctypes.CDLL(str(found))


def _check(what: str, status: int) -> None:
    if status:
        raise CublasError(f"{what} says status {status}.")


@cache
def handle() -> ctypes.c_void_p:
    """cuBLASLt's handle for this process's device."""
    made = ctypes.c_void_p()
    _check("cublasLtCreate", _library().cublasLtCreate(ctypes.byref(made)))
    return made


def version() -> int:
    """cuBLASLt's version, e.g. 130100: an algorithm's description holds for one version."""
    get = _library().cublasLtGetVersion
    get.restype = ctypes.c_size_t
    return int(get())


class Product:
    """Descriptors of one problem over given memory; ``launcher`` makes the call of it.

    Args:
        problem: what is computed.
        bias: address of the bias, 0 where there is none.
    """

    def __init__(self, problem: Problem, bias: int = 0) -> None:
        self.problem = problem
        lt = _library()
        if problem.acc == "f16":
            compute, scale = _COMPUTE_16F, "f16"
        elif problem.acc == "i32":
            compute, scale = _COMPUTE_32I, "i32"
        else:
            compute, scale = _COMPUTE_TF32 if problem.a.dtype == "tf32" else _COMPUTE_32F, "f32"
        self._desc = ctypes.c_void_p()
        _check(
            "cublasLtMatmulDescCreate",
            lt.cublasLtMatmulDescCreate(ctypes.byref(self._desc), compute, DATA[scale]),
        )
        self._set(_DESC_TRANSA, ctypes.c_int32(problem.transpose_a))
        self._set(_DESC_TRANSB, ctypes.c_int32(problem.transpose_b))
        self._set(_DESC_EPILOGUE, ctypes.c_uint32(EPILOGUE[problem.epilogue]))
        if problem.a.dtype == "f8e4m3":
            self._set(_DESC_FAST_ACCUM, ctypes.c_int8(problem.acc == "fast"))
        if bias:
            self._set(_DESC_BIAS, ctypes.c_void_p(bias))
            self._set(_DESC_BIAS_TYPE, ctypes.c_int32(DATA[problem.d.dtype]))
        self._layouts = [self._layout(m) for m in (problem.a, problem.b, problem.d)]
        number: Any = {"f32": ctypes.c_float, "i32": ctypes.c_int32, "f16": ctypes.c_uint16}[scale]
        one, zero = (number(0x3C00) if scale == "f16" else number(1)), number(0)
        self._alpha, self._beta = one, one if problem.epilogue == "residual" else zero

    def candidates(self, most: int) -> list[Candidate]:
        """Algorithms in the order of cuBLASLt's heuristic, ``most`` at the most; none where it supports nothing."""
        lt = _library()
        preference = ctypes.c_void_p()
        _check("cublasLtMatmulPreferenceCreate", lt.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        wanted: list[tuple[int, Any]] = [(_PREF_WORKSPACE, ctypes.c_size_t(WORKSPACE_BYTES))]
        if DATA[self.problem.d.dtype] not in (DATA["f32"], DATA["i32"]):
            wanted.append((_PREF_REDUCTIONS, ctypes.c_uint32(_REDUCTION_IN_COMPUTE_TYPE)))
        for attribute, value in wanted:
            _check(
                "cublasLtMatmulPreferenceSetAttribute",
                lt.cublasLtMatmulPreferenceSetAttribute(
                    preference, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
                ),
            )
        found, count = (_Heuristic * most)(), ctypes.c_int(0)
        a, b, d = self._layouts
        status = lt.cublasLtMatmulAlgoGetHeuristic(
            handle(), self._desc, a, b, d, d, preference, ctypes.c_int(most), found, ctypes.byref(count)
        )
        lt.cublasLtMatmulPreferenceDestroy(preference)
        if status == 15:  # CUBLAS_STATUS_NOT_SUPPORTED
            return []
        _check("cublasLtMatmulAlgoGetHeuristic", status)
        usable = (h for h in found[: count.value] if h.state == 0)
        return [Candidate(bytes(h.algo).hex(), h.workspace, rank) for rank, h in enumerate(usable)]

    def launcher(self, candidate: Candidate, addresses: Sequence[int], workspace: int, stream: int) -> Any:
        """A function without arguments that launches the product.

        Args:
            candidate: the algorithm.
            addresses: of A, B, C (D's, where there is no residual) and D.
            workspace: address of ``WORKSPACE_BYTES``.
            stream: the CUDA stream.
        """
        a, b, c, d = (ctypes.c_void_p(address) for address in addresses)
        layout_a, layout_b, layout_d = self._layouts
        algo = _algo(candidate.algo)
        matmul = _library().cublasLtMatmul
        alpha, beta = ctypes.byref(self._alpha), ctypes.byref(self._beta)
        arguments = (
            *(handle(), self._desc, alpha, a, layout_a, b, layout_b, beta, c, layout_d, d, layout_d),
            *(
                ctypes.byref(algo),
                ctypes.c_void_p(workspace),
                ctypes.c_size_t(WORKSPACE_BYTES),
                ctypes.c_void_p(stream),
            ),
        )

        # The arguments point into the descriptors: the function keeps them alive.
        def launch(_product: Product = self) -> None:
            status = matmul(*arguments)
            if status:
                raise CublasError(f"cublasLtMatmul says status {status}.")

        return launch

    def _layout(self, matrix: Matrix) -> ctypes.c_void_p:
        lt = _library()
        made = ctypes.c_void_p()
        _check(
            "cublasLtMatrixLayoutCreate",
            lt.cublasLtMatrixLayoutCreate(
                ctypes.byref(made),
                DATA[matrix.dtype],
                ctypes.c_uint64(matrix.rows),
                ctypes.c_uint64(matrix.columns),
                ctypes.c_int64(matrix.ld),
            ),
        )
        if self.problem.batch > 1:
            for attribute, value in (
                (_LAYOUT_BATCH, ctypes.c_int32(self.problem.batch)),
                (_LAYOUT_STRIDE, ctypes.c_int64(matrix.stride)),
            ):
                _check(
                    "cublasLtMatrixLayoutSetAttribute",
                    lt.cublasLtMatrixLayoutSetAttribute(
                        made, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
                    ),
                )
        return made

    def _set(self, attribute: int, value: Any) -> None:
        _check(
            "cublasLtMatmulDescSetAttribute",
            _library().cublasLtMatmulDescSetAttribute(
                self._desc, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
            ),
        )

    def __del__(self) -> None:
        lt = _library()
        for layout in getattr(self, "_layouts", ()):
            lt.cublasLtMatrixLayoutDestroy(layout)
        lt.cublasLtMatmulDescDestroy(self._desc)
