"""GEMM by cuBLASLt on a GPU: the library's first choice, replayed or unfused, and the best of its candidates.

Owns how a row-major case is put to a column-major library: C^T = op(B^T) op(A^T), so that cuBLASLt's first operand is
our B and D's rows are our columns, along which its bias runs. Epilogues are the library's own, but for the GELU of an
f32 result, which is a kernel of torch's: cuBLASLt's erred by up to 5e-6 near z = 1 (13.1), more than an evaluation in
f32 may. A grouped case is one product per group, launched one after the other. f8 wants both operands K-major (nt).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from impls.contract import Device, Implementation, Program, Unsupported
from impls.support import tuned
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

if TYPE_CHECKING:
    import torch

    from impls.cublas.kernels.lt import Candidate, Problem

WORKSPACE_BYTES = 32 * 2**20
# An algorithm's description holds for one version of this package.
_LIBRARY = "nvidia-cublas"
# Candidates that tuning asks the heuristic for; of 13.1 it has had eight at the most.
_MOST = 32


class Default(Implementation):
    """The baseline of GEMM on a GPU."""

    name: ClassVar[str] = "cublas.default"
    workload: ClassVar[str] = "gemm"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    summary: ClassVar[str] = "cuBLASLt, the heuristic's first algorithm, epilogue fused"

    def refuses(self, case: Case, device: Device) -> str | None:
        """f8 in other layouts than nt, or of sizes that are no multiples of 16."""
        assert isinstance(case, Gemm)
        if case.dtype == "f8e4m3":
            if case.layout != "nt":
                return "cuBLASLt multiplies f8 with both operands K-major only: ask for layout nt."
            if case.k % 16 or case.n % 16:
                return "cuBLASLt multiplies f8 where K and N are multiples of 16."
        if case.dtype == "i8" and case.epilogue != "none":
            return "cuBLASLt has no epilogue for i32 outputs."
        return None

    def workspace_bytes(self, case: Case) -> int:
        """What the vendor advises for Hopper."""
        return WORKSPACE_BYTES

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and C read and written by every step of the epilogue that is a kernel of its own."""
        assert isinstance(case, Gemm)
        return case.compulsory_bytes() + 2 * len(_steps(case, fused_epilogue(case))) * case.output_specs()["C"].nbytes

    def prepare(self, case: Case, device: Device) -> Program:
        """Nothing is compiled: the heuristic is asked.

        Raises:
            Unsupported: it has no algorithm.
        """
        assert isinstance(case, Gemm)
        return Product(case, fused_epilogue(case))


class Searched(Default):
    """What a careful user of the library gets: all candidates timed once, the best kept."""

    name: ClassVar[str] = "cublas.searched"
    summary: ClassVar[str] = "cuBLASLt, the fastest of its candidates on this device, searched beforehand"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Groups. What nobody has searched on this device is known to ``prepare``: tuning comes before."""
        assert isinstance(case, Gemm)
        if case.groups is not None:
            return "Grouped products are not searched: cublas.default has them."
        return super().refuses(case, device)

    def prepare(self, case: Case, device: Device) -> Program:
        """The algorithm that was chosen.

        Raises:
            Unsupported: none was, or with another cuBLAS.
        """
        assert isinstance(case, Gemm)
        kept = tuned.file(Path(__file__).parent, device.name)
        choice = dict(tuned.choices(kept, self.name)).get(case)
        if choice is None:
            raise Unsupported('No algorithm has been searched for this case on this device: run nox -s "tune(cublas)".')
        searched, here = tuned.versions(kept).get(_LIBRARY), metadata.version(_LIBRARY)
        if searched != here:
            raise Unsupported(f"It was searched with cuBLAS {searched}; here is {here}: search again.")
        from impls.cublas.kernels import lt

        return self.build(case, device, lt.Candidate.of(choice))

    def space(self, case: Gemm) -> list[Candidate]:
        """What tuning tries: the heuristic's candidates, which only the library on the device can tell."""
        program = Product(case, fused_epilogue(case))
        candidates = program.candidates(_MOST)
        program.release()
        return candidates

    def build(self, case: Gemm, device: Device, candidate: Candidate) -> Product:
        """The case by the given algorithm."""
        return Product(case, fused_epilogue(case), candidate)

    def compile_ahead(self, case: Gemm, candidate: Candidate, arch: str) -> None:
        """Nothing: the kernels lie in the library."""


class Graph(Default):
    """The baseline's launches, recorded once: what a call costs its host is one launch of a graph."""

    name: ClassVar[str] = "cublas.graph"
    summary: ClassVar[str] = "as cublas.default, captured in a CUDA graph over each input set and replayed"

    def prepare(self, case: Case, device: Device) -> Program:
        """Nothing is compiled: a graph is captured whenever inputs are loaded."""
        assert isinstance(case, Gemm)
        return _Replayed(case, fused_epilogue(case))


class Unfused(Default):
    """What the epilogue costs where nothing is fused: C goes to memory and back for every step of it."""

    name: ClassVar[str] = "cublas.unfused"
    summary: ClassVar[str] = "cuBLASLt's product, then a kernel of torch's for each step of the epilogue, in place"

    def refuses(self, case: Case, device: Device) -> str | None:
        """Cases without an epilogue, and those whose product cuBLASLt has not."""
        assert isinstance(case, Gemm)
        if case.epilogue == "none":
            return "There is no epilogue to leave unfused: cublas.default is the product."
        return super().refuses(replace(case, epilogue="none"), device)

    def traffic_bytes(self, case: Case) -> int:
        """Compulsory bytes, and C read and written by every step of the epilogue."""
        assert isinstance(case, Gemm)
        return case.compulsory_bytes() + 2 * len(_steps(case, "none")) * case.output_specs()["C"].nbytes

    def prepare(self, case: Case, device: Device) -> Program:
        """Nothing is compiled."""
        assert isinstance(case, Gemm)
        return Product(case, "none")


def fused_epilogue(case: Gemm) -> str:
    """What of the epilogue cuBLASLt computes with the product."""
    return "bias" if case.epilogue == "bias+gelu" and case.out == "f32" else case.epilogue


def _steps(case: Gemm, fused: str) -> list[str]:
    """What of the epilogue is left to kernels of their own."""
    return [step for step in case.epilogue.split("+") if step not in (*fused.split("+"), "none")]


@dataclass
class _Loaded:
    """One input set on the device, and the launches of one call over it."""

    inputs: dict[str, torch.Tensor]
    output: torch.Tensor
    launches: list[Callable[[], Any]]


class Product(Program):
    """One case over cuBLASLt, by the given algorithm or by the heuristic's first.

    Args:
        case: the case.
        fused: what of its epilogue is computed with the product; torch's kernels follow for the rest, in place.
        chosen: the algorithm; None asks the heuristic.

    Raises:
        Unsupported: the heuristic has no algorithm.
    """

    def __init__(self, case: Gemm, fused: str, chosen: Candidate | None = None) -> None:
        super().__init__()
        import torch

        from impls.cublas.kernels import lt
        from impls.support import torch_arrays

        torch.cuda.init()
        self._torch, self._lt, self._arrays = torch, lt, torch_arrays
        self._case, self._steps = case, _steps(case, fused)
        self._problems = list(_problems(case, fused))
        self._workspace = torch.empty(lt.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        # What each problem is given, so that both input sets are computed by the same kernel.
        self._chosen: dict[Problem, Candidate] = {}
        for problem, _ in self._problems:
            found = [chosen] if chosen else self._candidates(problem, 1)
            if not found:
                raise Unsupported("cuBLASLt's heuristic has no algorithm for this case.")
            self._chosen[problem] = found[0]
        self.config = {
            "cublaslt": lt.version(),
            "workspace_bytes": lt.WORKSPACE_BYTES,
            "epilogue_kernels": self._steps,
            "algorithm": found[0].described(),
        }

    def candidates(self, most: int) -> list[Candidate]:
        """The heuristic's algorithms for an ungrouped case, in its order."""
        [(problem, _)] = self._problems
        return self._candidates(problem, most)

    def _candidates(self, problem: Problem, most: int) -> list[Candidate]:
        # Any address stands for the bias's.
        bias = self._workspace.data_ptr() if "bias" in problem.epilogue else 0
        found: list[Candidate] = self._lt.Product(problem, bias).candidates(most)
        return found

    def load(self, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """Copies on the device, a new output, descriptors over both."""
        tensors = {name: self._arrays.to_torch(array).cuda() for name, array in inputs.items()}
        spec = self._case.output_specs()["C"]
        output = self._torch.empty(spec.shape, dtype=self._arrays.torch_dtype(spec.dtype), device="cuda")
        return self._bound(tensors, output)

    def over(self, loaded: _Loaded) -> _Loaded:
        """The inputs and output that another program of the case has loaded, computed by this one's algorithm."""
        return self._bound(loaded.inputs, loaded.output)

    def _bound(self, tensors: dict[str, torch.Tensor], output: torch.Tensor) -> _Loaded:
        return _Loaded(tensors, output, self._launches(tensors, output, 0))

    def _launches(self, tensors: dict[str, torch.Tensor], output: torch.Tensor, stream: int) -> list[Callable[[], Any]]:
        """The kernels of one call on a stream (its handle; 0 is CUDA's default), which is torch's current one."""
        c = tensors.get("residual", output)
        launches: list[Callable[[], Any]] = []
        for problem, (a, b, d) in self._problems:
            product = self._lt.Product(problem, tensors["bias"].data_ptr() if "bias" in problem.epilogue else 0)
            addresses = (
                tensors["B"].data_ptr() + b * dtype(self._case.dtype).bytes,
                tensors["A"].data_ptr() + a * dtype(self._case.dtype).bytes,
                c.data_ptr() + d * dtype(self._case.out).bytes,
                output.data_ptr() + d * dtype(self._case.out).bytes,
            )
            launches.append(product.launcher(self._chosen[problem], addresses, self._workspace.data_ptr(), stream))
        steps: dict[str, Callable[[], Any]] = {
            "bias": lambda: output.add_(tensors["bias"]),
            "residual": lambda: output.add_(tensors["residual"]),
            "relu": output.relu_,
            "gelu": lambda: self._torch.ops.aten.gelu_.default(output, approximate="tanh"),
        }
        return launches + [steps[step] for step in self._steps]

    def refill(self, loaded: _Loaded, inputs: Mapping[str, np.ndarray]) -> _Loaded:
        """In place."""
        for name, tensor in loaded.inputs.items():
            tensor.copy_(self._arrays.to_torch(inputs[name]))
        return loaded

    def run(self, loaded: _Loaded) -> torch.Tensor:
        """C."""
        for launch in loaded.launches:
            launch()
        return loaded.output

    def poison(self, loaded: _Loaded) -> None:
        """NaN into C."""
        self._arrays.poison(loaded.output)

    def read_outputs(self, result: torch.Tensor) -> dict[str, np.ndarray]:
        """C."""
        return {"C": self._arrays.to_numpy(result)}

    def read_inputs(self, loaded: _Loaded) -> dict[str, np.ndarray]:
        """The copies."""
        return {name: self._arrays.to_numpy(tensor) for name, tensor in loaded.inputs.items()}

    def synchronize(self) -> None:
        """Wait for the device."""
        self._torch.cuda.synchronize()

    def release(self) -> None:
        """Give the memory back to the device: torch would keep it."""
        del self._workspace
        self._torch.cuda.empty_cache()


class _Replayed(Product):
    """The same launches, captured in a CUDA graph over each input set."""

    def _bound(self, tensors: dict[str, torch.Tensor], output: torch.Tensor) -> _Loaded:
        for launch in self._launches(tensors, output, 0):
            launch()  # loads the kernels, which cannot be done in a capture
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            for launch in self._launches(tensors, output, self._torch.cuda.current_stream().cuda_stream):
                launch()
        return _Loaded(tensors, output, [graph.replay])


def _problems(case: Gemm, epilogue: str) -> Iterator[tuple[Problem, tuple[int, int, int]]]:
    """The products of a case, each with the first elements of A, B and C that it takes. Empty groups have none."""
    from impls.cublas.kernels.lt import Matrix, Problem

    m, n, k = case.m, case.n, case.k
    groups = [(0, m, 0)]
    if case.groups is not None:
        ends = accumulate(case.groups)
        groups = [(end - rows, rows, g) for g, (rows, end) in enumerate(zip(case.groups, ends, strict=True)) if rows]
    a_transposed, b_transposed = (stored == "t" for stored in case.layout)
    for first, rows, group in groups:
        # Stored rows are columns here: A (M, K) is K x M with leading dimension K, and so on.
        a = Matrix(case.dtype, rows, k, rows, m * k) if a_transposed else Matrix(case.dtype, k, rows, k, m * k)
        b = Matrix(case.dtype, k, n, k, n * k) if b_transposed else Matrix(case.dtype, n, k, n, n * k)
        problem = Problem(
            a=b,
            b=a,
            d=Matrix(case.out, n, rows, n, m * n),
            transpose_a=b_transposed,
            transpose_b=a_transposed,
            batch=case.batch,
            acc=case.acc,
            epilogue=epilogue,
        )
        yield problem, (first * k, group * n * k, first * n)
