"""What a stack provides: implementations, and the programs they build. Standard library and NumPy only.

An implementation is metadata and decisions (may it run this case, what does it move); it is imported by the harness,
so its module must import no stack library at module level. Its ``prepare`` runs in the stack's worker process and may
import anything. A program is one case, built and ready to be called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from impls.workloads.base import Case


@dataclass(frozen=True)
class Device:
    """The device that cases run on.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        name: the vendor's name.
        arch: ``x86_64``, ``aarch64``, ``sm_90``, ...
        threads: CPU threads every stack may use (the worker's affinity); on a GPU, host threads.
        memory_bytes: memory that cases may fill.
        features: instruction-set features that matter here, e.g. ``avx512f``, ``avx512_bf16``, ``amx_bf16``.
    """

    kind: str
    name: str
    arch: str
    threads: int
    memory_bytes: int
    features: frozenset[str] = field(default_factory=frozenset)


class Program(ABC):
    """One case, built by one implementation in its worker.

    The worker calls ``load`` once per input set, then ``run`` many times. ``run`` must do the whole of the work on
    every call, leave its inputs as they are, and on a CPU return only when the outputs are complete (on a GPU it may
    return early, on any stream; ``synchronize`` waits).

    Attributes:
        config: the configuration that was chosen (tiles, algorithm, threads ...): JSON values, goes into the record.
        artefacts: generated code worth keeping (file name -> text or bytes).
        flags: short remarks for the record, e.g. ``graph breaks: 2``.
    """

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.artefacts: dict[str, str | bytes] = {}
        self.flags: list[str] = []

    @abstractmethod
    def load(self, inputs: Mapping[str, np.ndarray]) -> Any:
        """Put one set of inputs where ``run`` wants them (with preallocated outputs, residuals of a forward pass, ...).

        The arrays are the worker's own copies and stay alive and unmoved while the set is loaded: a CPU program may
        wrap them without a copy.
        """

    @abstractmethod
    def refill(self, loaded: Any, inputs: Mapping[str, np.ndarray]) -> Any:
        """New contents for a loaded set: in place (the pointers stay) where the library allows it, else as ``load``.

        Where ``load`` wrapped the worker's arrays without a copy, the worker has already rewritten them in place.

        Returns:
            The loaded set to use from now on.
        """

    @abstractmethod
    def run(self, loaded: Any) -> Any:
        """One call: the timed region. Returns whatever ``read_outputs`` needs."""

    @abstractmethod
    def read_outputs(self, result: Any) -> dict[str, np.ndarray]:
        """The outputs of a ``run`` on the host, by name: shapes and storage dtypes of ``case.output_specs()``."""

    @abstractmethod
    def read_inputs(self, loaded: Any) -> dict[str, np.ndarray]:
        """The inputs of a loaded set as they are now, on the host: the judge looks whether ``run`` wrote to them."""

    def poison(self, loaded: Any) -> None:  # noqa: B027 (optional)
        """Fill preallocated outputs with NaN (integers: the least value). Nothing to do where ``run`` allocates."""

    def synchronize(self) -> None:  # noqa: B027 (optional)
        """Wait until the device has finished everything this program launched."""

    def release(self) -> None:  # noqa: B027 (optional)
        """Free what the program holds, device memory above all."""


class Implementation(ABC):
    """One way of computing one workload: ``stack.variant``.

    Attributes:
        name: ``stack.variant``; the stack is the package it lives in.
        workload: name of the workload, e.g. ``gemm``. A name may serve several workloads, with one class for each.
        devices: device kinds it runs on.
        summary: one line for ``ridgemark list``.
        simulated_on: those of ``devices`` that only simulate it (an interpreter): it is judged there (status
            ``checked``), never timed, and takes part only where it is named.
        races: ``prepare`` times candidates on the device, as compilers do that choose among kernels. On a GPU it is
            alone there meanwhile: whatever else ran would take part in the choice.
    """

    name: ClassVar[str]
    workload: ClassVar[str]
    devices: ClassVar[tuple[str, ...]]
    summary: ClassVar[str]
    simulated_on: ClassVar[tuple[str, ...]] = ()
    races: ClassVar[bool] = False

    @property
    def stack(self) -> str:
        """The part of the name before the point."""
        return self.name.partition(".")[0]

    def refuses(self, case: Case, device: Device) -> str | None:
        """Why it cannot run this case here, in one sentence; None where it can. ``devices`` is looked at before."""
        return None

    def traffic_bytes(self, case: Case) -> int:
        """Bytes moved to and from memory by design: unfused attention writes the score matrix, fused does not."""
        return case.compulsory_bytes()

    def workspace_bytes(self, case: Case) -> int:
        """Bytes needed beyond inputs and outputs, for the memory plan."""
        return 0

    @abstractmethod
    def prepare(self, case: Case, device: Device) -> Program:
        """Build the case: import, compile, autotune nothing. Runs in the stack's worker.

        Raises:
            Unsupported: the stack itself refuses, which could not be known without asking it.
        """


class Unsupported(Exception):
    """Raised by ``prepare`` where only the stack's own compiler could say no; the message is the record's reason."""
