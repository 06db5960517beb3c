"""One case on a device: tensors, and the kernels that one call launches over them.

Owns copies of the inputs, outputs, the compilation of what a call launches, and what the record says of the code. It
does not know what is computed: an implementation's ``bind`` says which kernels run over which tensors. Kernels written
in Gluon are launched in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
import triton

from impls.contract import Device
from impls.support import machine_code, torch_arrays
from impls.support.torch_program import TorchProgram
from impls.triton.kernels import interpreter
from impls.workloads.base import Case, TensorSpec

interpreter.mend()

Tensors = Mapping[str, torch.Tensor]
# Persistent programs where there is no device to ask: few, so that each of them has several tiles.
_PROGRAMS_WITHOUT_DEVICE = 3


@cache
def multiprocessors() -> int:
    """Multiprocessors of the current device; a small number where there is none."""
    if torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"):
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
    return _PROGRAMS_WITHOUT_DEVICE


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid and its arguments.

    Attributes:
        kernel: a function under ``triton.jit`` or ``gluon.jit``.
        grid: programs along one to three axes.
        arguments: every parameter of the kernel by name, constants too.
        options: ``num_warps``, ``num_stages``, ``maxnreg`` ...
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)

    @cached_property
    def compiled(self) -> Any:
        """Triton's compiled kernel; None where the interpreter runs it."""
        return self.kernel.warmup(**self.arguments, **self.options, grid=self.grid)

    def bound(self) -> Callable[[], None]:
        """The launch as a function without arguments.

        A compiled kernel is launched as it is: looking it up by its arguments again, as a call of the kernel by name
        does, costs the host some 20 us each time.
        """
        if self.compiled is None:
            return lambda: self.kernel[self.grid](**self.arguments, **self.options)
        run = self.compiled[(*self.grid, 1, 1)[:3]]
        arguments = [self.arguments[name] for name in self.kernel.arg_names]
        return lambda: run(*arguments)


@dataclass(frozen=True)
class Work:
    """What one input set makes the device do.

    Attributes:
        launches: kernels of one call, in order; also any function without arguments.
        residuals: what runs when inputs are loaded or replaced, outside the call: the forward pass of a backward case.
        scratch: tensors that neither the case nor a launch holds on to.
    """

    launches: Sequence[Launch | Callable[[], Any]]
    residuals: Sequence[Launch | Callable[[], Any]] = ()
    scratch: Sequence[torch.Tensor] = ()


@dataclass
class _Loaded:
    """One input set on the device."""

    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    work: Work
    call: list[Callable[[], Any]]


class LaunchedProgram(TorchProgram):
    """One case over kernels of ours.

    Args:
        case: the case.
        device: where it runs; on ``cpu`` Triton's interpreter must be on (TRITON_INTERPRET=1).
        bind: from all tensors of the case by name, inputs and outputs, to the work of a call. It must not read the
            inputs' values, which are not there yet when kernels are compiled, and has to lead to the same kernels
            every time.
        config: for the record; ``kernels`` and ``code`` are added.
        describe: read the generated code, which takes the disassembler a second: not for a candidate of many.
    """

    def __init__(
        self,
        case: Case,
        device: Device,
        bind: Callable[[Tensors], Work],
        config: dict[str, Any],
        *,
        describe: bool = True,
    ) -> None:
        super().__init__()
        self._case, self._bind = case, bind
        self._where = torch.device("cuda" if device.kind == "cuda" else "cpu")
        self.config = config
        if self._where.type == "cuda":
            # For the descriptors that kernels make themselves.
            triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
            self._compile(describe)

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Copies on the device (on a CPU the arrays themselves), new outputs, and launches over both."""
        tensors = {name: torch_arrays.to_torch(array).to(self._where) for name, array in inputs.items()}
        outputs = _empty(self._case.output_specs(), self._where)
        return self.over(_Loaded(tensors, outputs, Work(()), []))

    def over(self, loaded: _Loaded) -> _Loaded:
        """A set that another program of the same case has loaded, under this one's launches: what tuning times."""
        work = self._bind(loaded.inputs | loaded.outputs)
        over = _Loaded(loaded.inputs, loaded.outputs, work, [_callable(launch) for launch in work.launches])
        self._prepare_residuals(over)
        return over

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """In place; residuals are made anew."""
        super().refill(loaded, inputs)
        self._prepare_residuals(loaded)
        return loaded

    def run(self, loaded: _Loaded) -> dict[str, torch.Tensor]:
        """The outputs."""
        for launch in loaded.call:
            launch()
        return loaded.outputs

    @classmethod
    def compile_ahead(cls, case: Case, bind: Callable[[Tensors], Work]) -> list[Any]:
        """Triton's compiled kernels of a call, without a device: for the target that ``ahead.use`` has set."""
        tensors = _empty(case.input_specs() | case.output_specs(), torch.device("cpu"))
        work = bind(tensors)
        return [launch.compiled for launch in (*work.launches, *work.residuals) if isinstance(launch, Launch)]

    def _compile(self, describe: bool) -> None:
        """Compile what a call launches, over tensors that have the case's shapes and no contents."""
        work = self._bind(_empty(self._case.input_specs() | self._case.output_specs(), self._where))
        kernels = [launch for launch in (*work.launches, *work.residuals) if isinstance(launch, Launch)]
        self.config["kernels"] = []
        codes = []
        for launch in kernels:
            compiled = launch.compiled
            _ = compiled.run  # loads it: registers and spills are known from here on
            metadata = compiled.metadata
            self.config["kernels"].append(
                {
                    "name": compiled.name,
                    "grid": list(launch.grid),
                    "warps": metadata.num_warps,
                    "stages": metadata.num_stages,
                    "shared_bytes": metadata.shared,
                    "registers": compiled.n_regs,
                    "spills": compiled.n_spills,
                }
            )
            if describe:
                code = machine_code.inspect(
                    compiled.asm["cubin"], ptx=compiled.asm["ptx"], dynamic_shared_bytes=metadata.shared
                )
                codes.append(code.facts)
                self.artefacts |= code.artefacts(compiled.name)
        if codes:
            self.config["code"] = codes[0] if len(codes) == 1 else {"launches": codes}

    def _prepare_residuals(self, loaded: _Loaded) -> None:
        for launch in loaded.work.residuals:
            _callable(launch)()


def _callable(launch: Launch | Callable[[], Any]) -> Callable[[], Any]:
    return launch.bound() if isinstance(launch, Launch) else launch


def _empty(specs: Mapping[str, TensorSpec], where: torch.device) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(spec.shape, dtype=torch_arrays.torch_dtype(spec.dtype), device=where)
        for name, spec in specs.items()
    }
