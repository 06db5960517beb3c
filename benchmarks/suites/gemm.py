"""GEMM suites: every GEMM belongs to one of them."""

from __future__ import annotations

from impls.workloads.base import Case
from impls.workloads.gemm import Gemm

from . import _suite


def _plain(case: Case) -> Gemm | None:
    """``case`` where it is one product without an epilogue."""
    one = isinstance(case, Gemm) and case.batch == 1 and case.groups is None and case.epilogue == "none"
    return case if one and isinstance(case, Gemm) else None


def _square(case: Gemm) -> bool:
    return case.m == case.n == case.k


def _spec(case: Case) -> str:
    return case.id.partition(":")[2]


class Square(_suite.Suite):
    """Square GEMM against n: where the rate saturates."""

    title = "square GEMM against n"
    workload = "gemm"
    axes = ("dtype", "n")

    @classmethod
    def place(cls, case: Case) -> _suite.Place | None:
        """(dtype and what differs from the default, n)."""
        gemm = _plain(case)
        if gemm is None or not _square(gemm):
            return None
        return (_spec(gemm).partition(":")[2], gemm.n)


class Llm(_suite.Suite):
    """Linear layers of language models: the weight as (N, K), few rows in decoding, many in prefill."""

    title = "GEMMs of language models"
    workload = "gemm"
    axes = ("gemm",)

    @classmethod
    def place(cls, case: Case) -> _suite.Place | None:
        """(shape and dtype)."""
        gemm = _plain(case)
        return None if gemm is None or _square(gemm) or gemm.layout != "nt" else (_spec(gemm),)


class Shapes(_suite.Suite):
    """Other single products: awkward sizes, deep and shallow K, training's layouts."""

    title = "GEMMs of other shapes"
    workload = "gemm"
    axes = ("gemm",)

    @classmethod
    def place(cls, case: Case) -> _suite.Place | None:
        """(shape, dtype and layout)."""
        gemm = _plain(case)
        return None if gemm is None or _square(gemm) or gemm.layout == "nt" else (_spec(gemm),)


class Epilogues(_suite.Suite):
    """The same product with bias, activation or residual: what fusing saves."""

    title = "GEMM with an epilogue"
    workload = "gemm"
    axes = ("gemm", "epilogue")

    @classmethod
    def place(cls, case: Case) -> _suite.Place | None:
        """(shape and dtype, epilogue)."""
        if not isinstance(case, Gemm) or case.epilogue == "none":
            return None
        return (_spec(case).removesuffix(f":{case.epilogue}"), case.epilogue)


class Batched(_suite.Suite):
    """Many products at once: batched, and grouped as a mixture of experts needs it."""

    title = "batched and grouped GEMM"
    workload = "gemm"
    axes = ("gemm",)

    @classmethod
    def place(cls, case: Case) -> _suite.Place | None:
        """(shape and dtype)."""
        if not isinstance(case, Gemm) or case.epilogue != "none" or (case.batch == 1 and case.groups is None):
            return None
        return (_spec(case),)
