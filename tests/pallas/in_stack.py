"""What the tests ask of the Pallas stack's own environment: run by its interpreter, answers with JSON on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.engine.timing import gpu as gpu_timing
from impls.contract import Device
from impls.pallas import attention as attention_stack
from impls.pallas import gemm as gemm_stack
from impls.pallas import tiling
from impls.pallas.kernels import (
    mosaic_attention,
    mosaic_backward,
    mosaic_decode,
    mosaic_gemm,
    triton_attention,
    triton_gemm,
)
from impls.pallas.kernels.program import Compiled
from impls.pallas.kernels.tpu_program import Raced, Simulated
from impls.support.h200 import H200, MULTIPROCESSORS
from impls.workloads.attention import Attention
from impls.workloads.base import Case, parse_case
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

CPU = Device("cpu", "a CPU", "x86_64", 2, 2**34)
MOSAIC, TRITON = "mosaic_gpu_v2", "__gpu$xla.gpu.triton"


def _shapes(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    return {n: jax.ShapeDtypeStruct(s.shape, dtype(s.dtype).storage) for n, s in case.input_specs().items()}


def _mosaic(case: Case) -> Callable[..., Any]:
    if isinstance(case, Gemm):
        return mosaic_gemm.function(case, tiling.gemm(case, H200.name)[0], MULTIPROCESSORS, None)
    assert isinstance(case, Attention)
    if case.direction == "bwd":
        forward = mosaic_attention.function(case, tiling.attention(case, H200.name, True)[0], None, residuals=True)
        backward = mosaic_backward.function(case, tiling.backward(case, H200.name)[0], None)

        def both(Q: Any, K: Any, V: Any, dO: Any) -> Any:
            o, lse = forward(Q, K, V)
            return backward(Q, K, V, dO, o, lse)

        return both
    if tiling.decodes(case):
        return mosaic_decode.function(case, tiling.decode(case, H200.name)[0], MULTIPROCESSORS, None)
    return mosaic_attention.function(case, tiling.attention(case, H200.name)[0], None)


def lower(kind: str, *case_ids: str) -> dict[str, Any]:
    """How often each case, exported for CUDA, calls a kernel of the kind."""
    return {case_id: _calls(kind, parse_case(case_id)) for case_id in case_ids}


def _calls(kind: str, case: Case) -> int:
    if kind == "mosaic":
        target, function = MOSAIC, _mosaic(case)
    elif isinstance(case, Gemm):
        target, function = TRITON, triton_gemm.function(case, tiling.triton_gemm(case, H200.name)[0], interpret=False)
    else:
        assert isinstance(case, Attention)
        target, function = (
            TRITON,
            triton_attention.function(case, tiling.triton_attention(case, H200.name)[0], interpret=False),
        )
    gpu = jax.sharding.AbstractDevice("NVIDIA H100", MULTIPROCESSORS, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=gpu)):
        checks = [export.DisabledSafetyCheck.custom_call(target)]
        exported = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(**_shapes(case))
    module = exported.mlir_module()
    # A kernel of such a name would be taken for the harness's own, and its time for nobody's.
    assert gpu_timing.OWN_PREFIX not in module
    return module.count(f"@{target}")


def tpu(case_id: str) -> dict[str, Any]:
    """What the program of a TPU kernel says of itself."""
    case = parse_case(case_id)
    program = (gemm_stack if isinstance(case, Gemm) else attention_stack).Tpu().prepare(case, CPU)
    return {"config": program.config, "artefacts": {name: str(text) for name, text in program.artefacts.items()}}


def race(waits: str) -> dict[str, Any]:
    """Whether a copy that is read without waiting for it is noticed, and one that is waited for is not."""

    def kernel(x: Any, o: Any, room: Any, arrived: Any) -> None:
        copy = pltpu.make_async_copy(x, room, arrived)
        copy.start()
        if waits == "yes":
            copy.wait()
        o[...] = room[...]
        if waits != "yes":
            copy.wait()

    case = parse_case("gemm:8x128x128:f32")
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager"),
    )
    program = Simulated(case, CPU, lambda A, B: call(A), {})
    assert isinstance(program, Compiled)
    try:
        program.run(program.load(case.inputs(1)))
    except Raced:
        return {"raced": True, "seen": interpret_pallas_call.races.races_found}
    return {"raced": False, "seen": interpret_pallas_call.races.races_found}


ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {f.__name__: f for f in (lower, tpu, race)}

if __name__ == "__main__":
    # After whatever the interpreter prints, a line of its own.
    print(json.dumps(ANSWERS[sys.argv[1]](*sys.argv[2:])))
