"""XLA from the StableHLO artefact that the iree stack compiles too, with what XLA makes of it in the record.

The artefact is written for a CPU, as IREE compiles it. The bytes go through ``jax.export``, which parses them as they
are and hands them to XLA. The record's configuration says what optimisation did (fusions, operations, temporaries,
layouts before and after); both HLO texts are artefacts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from impls.contract import Device, Program
from impls.workloads.attention import Attention
from impls.workloads.base import Case
from impls.xla import attention, gemm

if TYPE_CHECKING:
    import jax


class Gemm(gemm.Default):
    """A product from StableHLO."""

    name: ClassVar[str] = "xla.stablehlo"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "the StableHLO artefact that iree.llvm_cpu compiles too"

    def prepare(self, case: Case, device: Device) -> Program:
        """Exports, lowers and compiles the case."""
        return _FromBytes(case, device)


class AttentionFromStableHlo(attention.Plain):
    """Attention from StableHLO."""

    name: ClassVar[str] = "xla.stablehlo"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    summary: ClassVar[str] = "the StableHLO artefact that iree.stablehlo compiles too"

    def workspace_bytes(self, case: Case) -> int:
        """Scores, probabilities, backward dP, dS and one of them turned around; operands turned, f16 raised before."""
        assert isinstance(case, Attention)
        scores = 4 * case.batch * case.hq * case.sq * case.sk
        operands = sum(spec.nbytes for spec in case.input_specs().values())
        return (2 if case.direction == "fwd" else 5) * scores + (4 if case.dtype == "f16" else 1) * operands

    def prepare(self, case: Case, device: Device) -> Program:
        """Exports, lowers and compiles the case; for the backward pass alone, the forward pass of its residuals too."""
        return _FromBytes(case, device)


@dataclass
class _Loaded:
    """One input set.

    Attributes:
        inputs: copies of the inputs, by name.
        arguments: what a call is given: these, and a forward pass's residuals.
    """

    inputs: dict[str, jax.Array]
    arguments: tuple[jax.Array, ...]


class _FromBytes(Program):
    """The artefact's function, compiled ahead."""

    def __init__(self, case: Case, device: Device) -> None:
        super().__init__()
        import jax

        from impls.support import jax_arrays, jax_cases, jax_setup, stablehlo

        self._arrays = jax_arrays
        self._block = jax.block_until_ready
        self._outputs = tuple(case.output_specs())
        self.config = jax_setup.configure(device)

        def compiled(artefact: stablehlo.Artefact) -> tuple[jax.stages.Lowered, jax.stages.Compiled]:
            lowered = jax.jit(artefact.exported.call).lower(*artefact.exported.in_avals)
            return lowered, lowered.compile()

        artefact = stablehlo.export(jax_cases.computation(case))
        lowered, self._call = compiled(artefact)
        self._forward = None
        if isinstance(case, Attention) and case.direction == "bwd":
            _, self._forward = compiled(stablehlo.export(jax_cases.residuals(case)))
        before, after = (
            _without_sources(lowered.compiler_ir("hlo").as_hlo_text()),
            _without_sources(self._call.as_text()),
        )
        self.config |= artefact.config() | _view(before, after)
        memory = self._call.memory_analysis()
        self.config["temporary_bytes"] = memory.temp_size_in_bytes
        self.artefacts["module.stablehlo"] = artefact.data
        self.artefacts["hlo_before_optimization.txt"] = before
        self.artefacts["optimized_hlo.txt"] = after

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Copies of the inputs; for the backward pass alone, the forward pass's residuals."""
        arrays = {name: self._arrays.to_jax(array) for name, array in inputs.items()}
        arguments = tuple(arrays.values())
        if self._forward is not None:
            arguments += tuple(self._forward(*(array for name, array in arrays.items() if name != "dO")))
        return _Loaded(arrays, self._block(arguments))

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """New copies and residuals: jax's arrays are immutable."""
        return self.load(inputs)

    def run(self, loaded: _Loaded) -> Any:
        """The case's outputs in their order, complete."""
        return self._block(self._call(*loaded.arguments))

    def read_outputs(self, result: Any) -> dict[str, np.ndarray]:
        """The outputs on the host."""
        return {name: self._arrays.to_numpy(o) for name, o in zip(self._outputs, result, strict=True)}

    def read_inputs(self, loaded: _Loaded) -> dict[str, np.ndarray]:
        """The copies."""
        return {name: self._arrays.to_numpy(array) for name, array in loaded.inputs.items()}


# An instruction of an HLO text: name, type with layout, opcode, operands.
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)", re.MULTILINE)
# Computations that run inside one instruction: a fusion's, a reduction's.
_INNER = re.compile(r" (?!call)[\w\-]+\([^\n]*?(?:calls|to_apply)=%?([\w.\-]+)")
_UNCOUNTED = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "call"})


def _view(before: str, after: str) -> dict[str, Any]:
    """What optimisation did, read from both HLO texts.

    ``fusions`` counts by kind; ``operations`` counts what is executed one by one, the insides of fusions and reductions
    left out; layouts are minor to major: ``entry_layout`` of parameters and results, ``dots`` of products and operands.
    """
    kinds = Counter(re.findall(r" fusion\(.*?kind=k(\w+)", after))
    texts = {"before": before, "after": after}
    return {
        "fusions": dict(sorted(kinds.items())),
        "operations": {when: _operations(hlo) for when, hlo in texts.items()},
        "entry_layout": {when: _entry_layout(hlo) for when, hlo in texts.items()},
        "dots": {when: _dots(hlo) for when, hlo in texts.items()},
    }


def _operations(hlo: str) -> dict[str, int]:
    inner = set(_INNER.findall(hlo))
    found: Counter[str] = Counter()
    for block in hlo.split("\n\n"):
        name = re.match(r"\s*(?:ENTRY )?%?([\w.\-]+) ", block)
        if name is not None and name.group(1) not in inner:
            found.update(opcode for _, _, opcode, _ in _INSTRUCTION.findall(block) if opcode not in _UNCOUNTED)
    return dict(sorted(found.items()))


def _dots(hlo: str) -> list[str]:
    """Every product as ``result = operand x operand``, each a type with its layout."""
    instructions = _INSTRUCTION.findall(hlo)
    types = {name: kind for name, kind, _, _ in instructions}
    operands = [(kind, re.findall(r"%?([\w.\-]+)(?:,|$)", given)) for _, kind, op, given in instructions if op == "dot"]
    return [f"{kind} = {' x '.join(types[name] for name in names)}" for kind, names in operands]


def _entry_layout(hlo: str) -> str:
    found = re.search(r"entry_computation_layout=\{(.*->\S+?\}?)\}(?:,|$)", hlo.splitlines()[0])
    return found.group(1) if found else ""


def _without_sources(hlo: str) -> str:
    """The text without the exporting machine's paths."""
    hlo = re.sub(r",? metadata=\{[^}]*\}", "", hlo)
    return re.sub(r"\nFileNames\n.*?\nStackFrames\n.*?\n\n", "\n", hlo, flags=re.DOTALL)
