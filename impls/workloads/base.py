"""What every workload's case provides. One workload is one module beside this one.

Owns the interface and the lookup of workloads by name; formulas live with their workload.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from impls.workloads.dtypes import dtype


class CaseError(ValueError):
    """A case that cannot be: malformed, of zero or absurd size, or contradictory. The message says what to write."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape (elements, row-major) and dtype name of one input or output."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor occupies."""
        return math.prod(self.shape) * dtype(self.dtype).bytes


@dataclass(frozen=True)
class Expected:
    """What the judge holds of one output: float64 values and an absolute tolerance for chosen elements.

    Attributes:
        index: per axis of the output, the chosen coordinates as an integer array (an open mesh, as
            ``np.ix_`` takes them), or None for the whole output.
        value: float64 reference, shape of the selection.
        tolerance: float64 absolute tolerance, broadcastable to ``value``; 0 means exact.
    """

    index: tuple[np.ndarray, ...] | None
    value: np.ndarray
    tolerance: np.ndarray

    def select(self, output: np.ndarray) -> np.ndarray:
        """The chosen elements of an output, in their own dtype."""
        return output if self.index is None else output[np.ix_(*self.index)]


class Case(ABC):
    """One workload with its shape, dtypes and options: what is computed, not how.

    Subclasses are frozen dataclasses. ``parse(case.id) == case`` always holds.
    """

    workload: ClassVar[str]

    @property
    @abstractmethod
    def id(self) -> str:
        """Stable readable name, ``<workload>:<spec>``; defaults are left out."""

    @classmethod
    @abstractmethod
    def parse(cls, spec: str) -> Case:
        """The case named by ``spec`` (the id without ``<workload>:``). Raises CaseError."""

    @abstractmethod
    def flops(self) -> int:
        """Nominal floating-point (or integer) operations of one call."""

    def exps(self) -> int:
        """Exponentials of one call, counted apart from ``flops``."""
        return 0

    @abstractmethod
    def compulsory_bytes(self) -> int:
        """Bytes that any implementation must move: each input read once, each output written once."""

    def total_bytes(self) -> int:
        """Memory that one set of inputs and outputs occupies."""
        return sum(spec.nbytes for spec in (*self.input_specs().values(), *self.output_specs().values()))

    def intensity(self) -> float:
        """Arithmetic intensity, FLOP per compulsory byte (Williams, Waterman, Patterson, CACM 2009)."""
        return self.flops() / self.compulsory_bytes()

    @property
    @abstractmethod
    def compute_dtype(self) -> str:
        """Name of the dtype whose arithmetic rate bounds this case (the ridge point's dtype), e.g. ``bf16``."""

    @abstractmethod
    def input_specs(self) -> dict[str, TensorSpec]:
        """Inputs by name, in the order they are passed."""

    @abstractmethod
    def output_specs(self) -> dict[str, TensorSpec]:
        """Outputs by name."""

    @abstractmethod
    def inputs(self, seed: int) -> dict[str, np.ndarray]:
        """Seeded random-normal inputs (uniform integers for integer dtypes), one array per input spec."""

    @abstractmethod
    def reference_flops(self) -> int:
        """Float64 operations that a full reference costs; the judge samples where this is too many."""

    @abstractmethod
    def expected(self, inputs: Mapping[str, np.ndarray], *, sample: int | None = None) -> dict[str, Expected]:
        """Float64 reference and derived tolerance for each output.

        Args:
            inputs: as ``inputs(seed)`` returned them.
            sample: seed of a choice of rows, columns or heads (at least one in every 64-wide tile of each output
                axis, and all borders); None computes everything.
        """

    def invariants(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray], seed: int) -> str | None:
        """A whole-output check that needs no full reference (Freivalds for GEMM); None where it holds or none exists.

        Returns:
            One sentence that says what does not hold.
        """
        return None

    def checker(self, inputs: Mapping[str, np.ndarray], seed: int) -> Callable[[Mapping[str, np.ndarray]], str | None]:
        """``invariants`` of many outputs of the same inputs. What follows from the inputs alone may be made once."""
        return lambda outputs: self.invariants(inputs, outputs, seed)


@cache
def workloads() -> dict[str, type[Case]]:
    """Every workload by name: the Case subclasses found in the modules of this package."""
    import impls.workloads as package

    found: dict[str, type[Case]] = {}
    for module_info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{module_info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Case) and "workload" in vars(value):
                found[value.workload] = value
    return found


def parse_case(case_id: str) -> Case:
    """The case with this id, such as ``gemm:512x512x512:f32``.

    Raises:
        CaseError: unknown workload or malformed spec; the message says what to write.
    """
    name, colon, spec = case_id.partition(":")
    known = workloads()
    if not colon or name not in known:
        raise CaseError(
            f"{case_id!r} does not begin with a workload; write one of " + ", ".join(f"{w}:..." for w in sorted(known))
        )
    return known[name].parse(spec)
