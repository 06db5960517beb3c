"""GEMM in TVM: a schedule by hand, the same with M symbolic and after Relax's fusion, and what MetaSchedule found.

Operands are packed inside the call, into words that the CPU's multiply instruction takes: f32, pairs of bf16 for
AVX-512 BF16, four bytes for VNNI. f16, and bf16 on CPUs without that instruction, are raised to f32 while they are
packed; f8e4m3 becomes bf16 or f32 likewise, exactly. The epilogue is applied to each tile of sums before it leaves the
cache. AMX is not used: TVM has its instructions, but no schedule of ours for them has been run.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from impls.contract import Device, Implementation, Program, Unsupported
from impls.tvm import records
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

if TYPE_CHECKING:
    import tvm

# Bytes that a packed element takes: words of 32 bits hold one f32 (f16 raised), two bf16 or four i8. Without the
# instructions bf16 and i8 take 4, which the device decides and the memory plan does not know: the larger counts.
_PACKED_BYTES = 4
# What threads hold of packed B (half an L2 each) and of sums in flight, in all: enough for some dozens of them.
_THREADS_BYTES = 32 << 20
# TVM's code takes every argument to begin at a multiple of this.
_ALIGNMENT = 64


class TensorIR(Implementation):
    """The packed product of ``kernels/product``, scheduled by hand for the case's sizes; or, of up to 16 rows with both
    operands along K, the one of ``kernels/dot``, which packs nothing.
    """

    name: ClassVar[str] = "tvm.tensorir"
    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "TensorIR schedule by hand: packed, register-blocked, tensorized, epilogue fused"

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32, accumulation that is not in f32 or i32, and groups."""
        assert isinstance(case, Gemm)
        if case.groups is not None:
            return "This schedule is made for one M; groups of unequal M are what tvm.symbolic serves."
        return _refuses_dtype(case)

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and A packed: written and read. B's packed blocks stay in the cache.

        Whether few rows are packed depends on the CPU; they hardly count.
        """
        assert isinstance(case, Gemm)
        return case.compulsory_bytes() + 2 * _packed_a(case)

    def workspace_bytes(self, case: Case) -> int:
        """Packed A; and each thread's block of packed B and its sums."""
        assert isinstance(case, Gemm)
        return _packed_a(case) + _THREADS_BYTES

    def prepare(self, case: Case, device: Device) -> Program:
        """Schedules and compiles the case."""
        assert isinstance(case, Gemm)
        return _Product(case, device)


class Symbolic(Implementation):
    """One compilation for an N, K, dtype, layout and epilogue, which serves every M, and all groups of a case."""

    name: ClassVar[str] = "tvm.symbolic"
    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "the hand schedule with M symbolic: one compilation serves every M and every group"

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32, accumulation that is not in f32 or i32, groups whose rows are not aligned."""
        assert isinstance(case, Gemm)
        if case.groups is not None and len(case.groups) > 1:
            rows = (case.k * dtype(case.dtype).bytes, case.n * dtype(case.out).bytes)
            if any(row % _ALIGNMENT for row in rows):
                return (
                    f"TVM's code takes arrays at multiples of {_ALIGNMENT} bytes, and the groups' rows "
                    f"of {rows[0]} and {rows[1]} bytes do not begin there."
                )
        return _refuses_dtype(case)

    def traffic_bytes(self, case: Case) -> int:
        """As ``TensorIR``'s."""
        assert isinstance(case, Gemm)
        return case.compulsory_bytes() + 2 * _packed_a(case)

    def workspace_bytes(self, case: Case) -> int:
        """As ``TensorIR``'s."""
        assert isinstance(case, Gemm)
        return _packed_a(case) + _THREADS_BYTES

    def prepare(self, case: Case, device: Device) -> Program:
        """Compiles, where no earlier case of this worker has done so."""
        assert isinstance(case, Gemm)
        return _SymbolicProduct(case, device)


class MetaSchedule(Implementation):
    """Schedules that TVM's auto-scheduler found and ``tuned/`` keeps, replayed; see ``kernels/plain`` and ``tune``."""

    name: ClassVar[str] = "tvm.metaschedule"
    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "MetaSchedule's best schedule from the committed records; other shapes are refused"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Cases without a record: a schedule of another shape is not this one's best, and often does not fit it."""
        assert isinstance(case, Gemm)
        if not any(case.id in records.load(family) for family in records.families()):
            return f"No CPU family has a tuned record for {case.id}; python -m impls.tvm.tune {case.id} makes one."
        return None

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and B in panels and raised operands written and read."""
        assert isinstance(case, Gemm)
        return case.compulsory_bytes() + 2 * self.workspace_bytes(case)

    def workspace_bytes(self, case: Case) -> int:
        """B in panels and A where it is raised or turned; sums before they are finished."""
        assert isinstance(case, Gemm)
        return 4 * case.batch * (case.k * (case.m + case.n) + case.m * case.n)

    def prepare(self, case: Case, device: Device) -> Program:
        """Replays the record and compiles it.

        Raises:
            Unsupported: there is no record for this CPU.
        """
        assert isinstance(case, Gemm)
        return _TunedProduct(case, device)


class Relax(Implementation):
    """A graph of matmul and what follows it, fused by Relax into one kernel."""

    name: ClassVar[str] = "tvm.relax"
    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "Relax graph, epilogue fused by FuseOps and FuseTIR, scheduled after fusion"

    def refuses(self, case: Case, device: Device) -> str | None:
        """TF32, accumulation that is not in f32 or i32, and groups."""
        assert isinstance(case, Gemm)
        if case.groups is not None:
            return "Relax has no operator for a grouped product."
        return _refuses_dtype(case)

    def traffic_bytes(self, case: Case) -> int:
        """As ``TensorIR``'s: the epilogue is fused."""
        assert isinstance(case, Gemm)
        return case.compulsory_bytes() + 2 * _packed_a(case)

    def workspace_bytes(self, case: Case) -> int:
        """As ``TensorIR``'s, and a second output: the virtual machine allocates a new one while the last is held."""
        assert isinstance(case, Gemm)
        return _packed_a(case) + _THREADS_BYTES + sum(spec.nbytes for spec in case.output_specs().values())

    def prepare(self, case: Case, device: Device) -> Program:
        """Fuses, schedules and compiles the graph."""
        assert isinstance(case, Gemm)
        from impls.tvm.kernels import graphs
        from impls.tvm.kernels.relaxed import RelaxProgram

        return RelaxProgram(case, graphs.gemm(case), device)


def _refuses_dtype(case: Gemm) -> str | None:
    if case.dtype == "tf32":
        return "TF32 is a format of GPU tensor cores; TVM on a CPU would compute in f32 instead."
    if case.acc not in ("f32", "i32"):
        return f"The kernels accumulate {case.dtype} in f32 and offer no acc={case.acc}."
    return None


def _packed_a(case: Gemm) -> int:
    return case.batch * case.m * case.k * _PACKED_BYTES


@dataclass
class _Loaded:
    """One input set.

    Attributes:
        given: the worker's arrays, by name.
        arrays: those, or aligned copies.
        calls: the arguments of each kernel call.
        c: the output.
    """

    given: Mapping[str, np.ndarray]
    arrays: dict[str, np.ndarray]
    calls: list[tuple[tvm.runtime.Tensor, ...]]
    c: np.ndarray


class _Kernel(Program):
    """A compiled function of A, B [, bias or residual] and C, called once or once per group."""

    def __init__(self, case: Gemm) -> None:
        super().__init__()
        from impls.tvm.kernels import arrays

        self._case = case
        self._arrays = arrays
        self._function: Any = None
        self._words = False

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Tensors over the worker's arrays (over copies, were they not aligned) and a new output."""
        case = self._case
        arrays = self._arrays
        held = {n: a if arrays.aligned(a) else arrays.copied(a) for n, a in inputs.items() if n != "group_sizes"}
        c = arrays.empty(case.output_specs()["C"].shape, dtype(case.out).storage)
        if case.groups is None:
            operand = arrays.words if self._words else arrays.tensor
            a, b, *addends = held.values()
            calls = [(operand(a), operand(b), *map(arrays.tensor, (*addends, c)))]
        else:
            calls = []
            for g, (rows, stop) in enumerate(zip(case.groups, accumulate(case.groups), strict=True)):
                if rows:
                    of_group = (held["A"][stop - rows : stop], held["B"][g], c[stop - rows : stop])
                    calls.append(tuple(map(arrays.tensor, of_group)))
        return _Loaded(inputs, held, calls, c)

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Nothing to do where the tensors lie over the worker's arrays."""
        self._arrays.update(loaded.arrays, inputs)
        loaded.given = inputs
        return loaded

    def run(self, loaded: _Loaded) -> _Loaded:
        """C, complete."""
        for arguments in loaded.calls:
            self._function(*arguments)
        return loaded

    def read_outputs(self, result: _Loaded) -> dict[str, np.ndarray]:
        """C."""
        return {"C": result.c}

    def read_inputs(self, loaded: _Loaded) -> dict[str, np.ndarray]:
        """What the kernel reads."""
        return {**loaded.given, **loaded.arrays}

    def poison(self, loaded: _Loaded) -> None:
        """NaN into C."""
        self._arrays.poison(loaded.c)


class _Product(_Kernel):
    def __init__(self, case: Gemm, device: Device) -> None:
        super().__init__(case)
        from impls.tvm.kernels import compiled, gemm, host

        machine = host.of(device)
        definition = gemm.define(case, machine)
        module, plan = gemm.scheduled(definition)
        executable = compiled.build(module, machine)
        self._words = definition.words
        self._function = executable["main"]
        self.config = compiled.config(machine) | plan.as_config()
        self.artefacts = compiled.artefacts(module, executable)


class _TunedProduct(_Kernel):
    def __init__(self, case: Gemm, device: Device) -> None:
        super().__init__(case)
        from impls.tvm.kernels import compiled, host, plain

        machine, family = host.of(device), host.family()
        record = records.load(family).get(case.id)
        if record is None:
            raise Unsupported(f"The tuned records for {case.id} are of other CPUs; this one is {family} to LLVM.")
        module = plain.replayed(case, record.trace)
        executable = compiled.build(module, machine)
        self._function = executable["main"]
        self.config = compiled.config(machine) | {
            "tuned_for": family,
            "tuned_threads": record.threads,
            "trials": record.trials,
            "tuning_s": record.seconds,
            "gain_over_default": round(record.gain, 2),
        }
        self.artefacts = compiled.artefacts(module, executable)
        if record.threads != device.threads:
            self.flags.append(f"tuned for {record.threads} threads, run with {device.threads}")


class _SymbolicProduct(_Kernel):
    def __init__(self, case: Gemm, device: Device) -> None:
        super().__init__(case)
        from impls.tvm.kernels import compiled, host

        machine = host.of(device)
        before = _symbolic.cache_info().hits
        built = _symbolic(_without_rows(case), device)
        self._function = built.function
        self.config = compiled.config(machine) | built.config | {"symbolic": ["M"]}
        self.artefacts = dict(built.artefacts)
        if _symbolic.cache_info().hits > before:
            self.flags.append("compiled by an earlier case of this worker, for another M")


@dataclass(frozen=True)
class _Built:
    function: Any
    config: dict[str, Any]
    artefacts: dict[str, str | bytes]


def _without_rows(case: Gemm) -> Gemm:
    """The case that stands for all that differ in M alone."""
    return Gemm(
        m=1, n=case.n, k=case.k, dtype=case.dtype, batch=case.batch, acc=case.acc, out=case.out,
        layout=case.layout, epilogue=case.epilogue,
    )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _symbolic(case: Gemm, device: Device) -> _Built:
    from impls.tvm.kernels import compiled, gemm, host

    machine = host.of(device)
    module, plan = gemm.scheduled(gemm.define(case, machine, symbolic=True))
    executable = compiled.build(module, machine)
    return _Built(executable["main"], plan.as_config(), compiled.artefacts(module, executable))
