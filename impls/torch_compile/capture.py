"""One captured function: how it is compiled, and what is known of the result.

Owns the capture (one graph or an error, static shapes), cold compile times, the generated code, and the proof that
nothing was compiled again later. It imports torch inside functions only.

``torch._dynamo.reset()`` also throws away what the worker's other programs run: their next call would compile again,
and be timed (seen in torch 2.13). Each captured function therefore gets a code object of its own. Dynamo keeps compiled
code by code object, so that no program meets another's guards or uses up its limit of recompilations, which is what a
reset per case is for; a reset follows where no program is left alive.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from impls.contract import Device, Unsupported
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype

if TYPE_CHECKING:
    import torch

_alive: weakref.WeakSet[Captured] = weakref.WeakSet()


def lacks_compiler(device: Device) -> str | None:
    """Why Inductor cannot generate code here, one sentence; None where it can.

    A GPU's kernels are launched by C code that Triton compiles; where CC is not set, it looks for gcc and clang.
    """
    # Where Inductor and Triton look.
    variable, known = ("CXX", ("g++",)) if device.kind == "cpu" else ("CC", ("gcc", "clang"))
    compilers = (os.environ[variable],) if variable in os.environ else known
    if not any(shutil.which(compiler) for compiler in compilers):
        names = " or ".join(compilers)
        return f"Inductor needs a compiler, and there is no {names}: install one, or name one in {variable}."
    return None


class Captured:
    """A function under ``torch.compile``, called like the function itself.

    Attributes:
        config: what is known of the compilation, for a program's ``config``; complete after ``compile``.
        artefacts: Inductor's generated code by file name.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: str,
        mode: str,
        device: Device,
        options: Mapping[str, Any] | None = None,
        products: Sequence[Callable[..., torch.Tensor]] = (),
    ) -> None:
        """Nothing is compiled yet.

        Args:
            function: of tensors; its shapes are fixed by its first call.
            backend: ``inductor`` or ``aot_eager``.
            mode: of ``torch.compile``: what Inductor may try.
            device: where it runs.
            options: of Inductor, beyond the mode's.
            products: of two matrices, ``f(a, b, *, out)``, that Inductor races besides its own where the mode races.
        """
        import torch

        if not _alive:
            torch._dynamo.reset()
        if device.kind == "cuda" and mode == "max-autotune":
            # The mode replays CUDA graphs besides, which is reduce_overhead's.
            mode = "max-autotune-no-cudagraphs"
        self.config: dict[str, Any] = {"backend": backend, "mode": mode}
        if options:
            self.config["options"] = dict(options)
        self.artefacts: dict[str, str | bytes] = {}
        self._backend, self._mode, self._device, self._options = backend, mode, device, dict(options or {})
        self._products = list(products)
        self._precision = torch.get_float32_matmul_precision()
        self._graphs = 0
        self._autotuned: list[dict[str, Any]] = []
        self._call = torch.compile(_with_own_code(function), backend=self._compile_graph, fullgraph=True, dynamic=False)
        _alive.add(self)

    @property
    def replays(self) -> bool:
        """Whether calls replay a CUDA graph: recorded over the tensors it is first called with, its outputs its own."""
        return self._mode == "reduce-overhead"

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """What the function returns."""
        import torch

        # Process-wide, and read by the library at every call: another program may have wanted another.
        if torch.get_float32_matmul_precision() != self._precision:
            torch.set_float32_matmul_precision(self._precision)
        if self.replays:
            torch.compiler.cudagraph_mark_step_begin()
        return self._call(*tensors)

    def release(self) -> None:
        """Drop recorded CUDA graphs, which hold the memory of their results."""
        if self.replays:
            from torch._inductor.cudagraph_trees import reset_cudagraph_trees

            reset_cudagraph_trees()

    def compile(self, first_call: Callable[[], Any]) -> None:
        """Compile by a first call, with every cache of Inductor empty; ``compile_s`` in ``config`` is its seconds.

        Raises:
            RuntimeError: the function became more than one graph.
            Unsupported: it was to be replayed, and Inductor recorded no CUDA graph of it.
        """
        import torch
        from torch._dynamo.utils import counters
        from torch._inductor import select_algorithm
        from torch._inductor.utils import fresh_cache

        if self._backend == "inductor":
            _warm_toolchain(self._device.kind, torch.get_num_threads())
        select_algorithm.add_feedback_saver(self._note_autotuning)
        before = dict(counters["inductor"])
        try:
            with fresh_cache():
                start = time.perf_counter()
                for _ in range(CALLS_TO_COMPILE.get(self._mode, 1)):
                    first_call()
                seconds = time.perf_counter() - start
        finally:
            select_algorithm.clear_feedback_savers()
        self.assert_compiled_once()
        if self.replays:
            skipped, copied = (
                counters["inductor"][name] - before.get(name, 0)
                for name in ("cudagraph_skips", "cudagraph_recorded_non_static_inputs")
            )
            if skipped:
                raise Unsupported("Inductor records no CUDA graph of this case, which torch_compile.default runs.")
            self.config["inputs_copied_by_replay"] = copied
        if self._backend == "inductor" and self._device.kind == "cuda":
            self.config["compile_threads"] = torch._inductor.config.compile_threads
        # fullgraph=True: a graph break would have been an error.
        self.config |= {"compile_s": round(seconds, 3), "graphs": self._graphs, "graph_breaks": 0, "recompiles": 0}
        if self._backend == "inductor":
            code = "\n".join(str(text) for text in self.artefacts.values())
            self.config["library_calls"] = sorted(set(re.findall(r"(?:extern_kernels|torch\.ops)\.([\w.]+)\(", code)))
            if self._device.kind == "cpu":
                self.config |= {
                    "cpp_kernels": code.count("async_compile.cpp_pybinding("),
                    "cpp_micro_gemm": "micro_gemm" in code,
                }
            else:
                kernels = re.findall(r"^(triton_\w+) = async_compile\.triton\(", code, re.MULTILINE)
                # Inductor's names: triton_tem_ for a template of a product or of attention, with what is fused into it.
                self.config["triton_kernels"] = kernels
        if self._autotuned:
            self.config["autotuned"] = self._autotuned

    def assert_compiled_once(self) -> None:
        """RuntimeError where Dynamo compiled the function more than once: a call then included a compilation."""
        if self._graphs != 1:
            raise RuntimeError(f"torch.compile made {self._graphs} graphs of a function that should be one.")

    def _compile_graph(self, graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """What Dynamo calls with each graph it has captured."""
        self._graphs += 1
        if self._backend == "aot_eager":
            from torch._dynamo.backends.debugging import aot_eager

            compiled: Callable[..., Any] = aot_eager(graph, inputs)
            return compiled
        import torch
        from torch._inductor.compile_fx import compile_fx

        # Constants are not folded and weights not packed beforehand: every tensor is an input of the call.
        patches = dict(torch._inductor.list_mode_options(self._mode)) | {"freezing": False} | self._options
        patches["external_matmul"] = self._products
        compiled = compile_fx(graph, inputs, inner_compile=self._compile_code, config_patches=patches)
        return compiled

    def _compile_code(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """What AOTAutograd calls with the forward pass, and with the backward pass at its first call."""
        from torch._inductor.compile_fx import compile_fx_inner

        output = compile_fx_inner(graph, inputs, **options)
        name = "backward.py" if options.get("is_backward") else "forward.py"
        self.artefacts[name] = output.source_code
        return output

    def _note_autotuning(self, timings: dict[Any, float], name: str, nodes: Any, choices: Any, *_: Any) -> None:
        """What Inductor calls with the time of every choice it has raced.

        The fastest is what it takes, except where an epilogue can be fused into another: ``library_calls`` and
        ``triton_kernels`` say what the code calls in the end.
        """
        raced = {str(getattr(choice, "name", choice)): (time_, choice) for choice, time_ in timings.items()}
        if raced:
            fastest = min(raced, key=lambda choice: raced[choice][0])
            note = {"operator": name, "fastest": fastest, "of": sorted(raced)}
            # A template's tiles, stages and warps.
            described = getattr(raced[fastest][1], "description", "")
            self._autotuned.append(note | ({"described": described} if described else {}))


class Inputs:
    """A program's tensors where it wants them: over the worker's arrays on a CPU, copies of them on a GPU."""

    def __init__(self, device: Device, stay: bool = False) -> None:
        """Nothing is placed yet.

        Args:
            device: where.
            stay: whether a CUDA graph may read them where they are, as it reads a model's weights: else every replay
                copies them to a place of its own first.
        """
        from impls.support import torch_arrays

        self._arrays, self._kind, self._stay = torch_arrays, device.kind, stay

    def place(self, inputs: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Tensors of the arrays, in their order."""
        import torch

        tensors = {name: self._arrays.to_torch(array).to(self._kind) for name, array in inputs.items()}
        if self._stay:
            for tensor in tensors.values():
                # No guard: a second set is recorded anew, not compiled anew.
                torch._dynamo.mark_static_address(tensor, guard=False)
        return tensors

    def replace(self, tensors: Mapping[str, torch.Tensor], inputs: Mapping[str, np.ndarray]) -> None:
        """New contents, in place. On a CPU the tensors lie over the worker's arrays, which have them already."""
        import torch

        if self._kind != "cpu":
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(self._arrays.to_torch(inputs[name]))

    def examples(self, case: Case) -> dict[str, torch.Tensor]:
        """Zeros in the shapes and dtypes of the case's inputs, to compile with."""
        return self.place({n: np.zeros(s.shape, dtype(s.dtype).storage) for n, s in case.input_specs().items()})

    def synchronize(self) -> None:
        """Wait for the device."""
        import torch

        if self._kind == "cuda":
            torch.cuda.synchronize()

    def release(self) -> None:
        """Give memory that torch holds for later back to the device."""
        import torch

        if self._kind == "cuda":
            torch.cuda.empty_cache()


# The warm-up, the recording and a replay of a CUDA graph take a call each.
CALLS_TO_COMPILE = {"reduce-overhead": 3}

# Why no CPU is among the devices of reduce_overhead, for its summary.
NO_CPU = "replayed as a CUDA graph, which a CPU has none of"


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function over a code object that no other function has."""
    assert isinstance(function, types.FunctionType)
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


@cache
def _warm_toolchain(kind: str, threads: int) -> None:
    """Let Inductor try out the compiler and precompile torch's headers, which it does once per process or machine."""
    import torch
    from torch._inductor.utils import fresh_cache

    def increment(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with fresh_cache():
        torch.compile(increment, dynamic=False)(torch.zeros(64, device=kind))


def work_dtype(name: str, out: str, device: Device) -> str:
    """The dtype in which operands of dtype ``name`` are multiplied for a result of ``out``; the product has it too.

    On a CPU f16 without f16 arithmetic, and f8e4m3, are raised, which is exact: torch's own products of them are many
    times slower. Products are accumulated in f32 (i8: i32), and leave in f32 where ``out`` is wider than the operands.
    """
    if name in ("f32", "i8") or device.kind == "cuda":
        return name
    if out == "bf16" and name in ("bf16", "f8e4m3"):
        return "bf16"
    # oneDNN multiplies f16 natively on CPUs with one of these.
    if out == name == "f16" and device.features & {"avx512_fp16", "amx_fp16", "fphp", "asimdhp"}:
        return "f16"
    return "f32"
