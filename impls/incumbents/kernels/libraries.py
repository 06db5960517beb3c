"""How FlashAttention-4 and QuACK are called for a case. Imported where they and CUTLASS' CuTe DSL are installed.

Owns which of their functions a case is, and with which arguments; what those launch is theirs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

from impls.support.h200 import MULTIPROCESSORS

# The libraries' own variables for compiling for an H200 without a GPU, read on import.
# FlashAttention-4 chooses splits by the multiprocessors, QuACK its grid.
os.environ.update(
    CUTE_DSL_ARCH="sm_90a",
    FLASH_ATTENTION_ARCH="sm_90",
    FLASH_ATTENTION_NUM_SMS=str(MULTIPROCESSORS),
    QUACK_ARCH="90",
    QUACK_CACHE_ENABLED="0",
)

import quack.gemm
import quack.gemm_interface
import quack.gemm_runtime.host
from flash_attn.cute import interface as flash
from quack.gemm_config import GemmConfig
from quack.gemm_sm90 import GemmSm90

from impls.incumbents.kernels.recorder import Call
from impls.workloads.attention import Attention
from impls.workloads.gemm import Gemm

# The host code skips its launches under fake tensors unless told otherwise: here they are what is sought.
flash.is_fake_mode = lambda: False


def _clusters(cluster_size: int, *_: Any, **__: Any) -> int:
    """Clusters resident at once, one block per multiprocessor: what the driver would be asked."""
    return MULTIPROCESSORS // cluster_size


for _module in (quack.gemm, quack.gemm_runtime.host):
    _module.get_max_active_clusters = _clusters


def attend(case: Attention, call: Call) -> None:
    """O, or the gradients, by FlashAttention-4."""
    q, k, v = (call.named(name, case.input_specs()[name].shape, case.dtype) for name in "QKV")
    window: dict[str, Any] = {}
    if case.mask == "window":
        window = {"window_size_left": case.window - 1, "window_size_right": 0}
    options = {"causal": case.mask == "causal", **window}
    out, lse, *_ = flash._flash_attn_fwd(q, k, v, return_lse=case.direction != "fwd", **options)
    if case.direction != "bwd":
        call.rename(out, "O")
    if case.direction == "fwd":
        return
    if case.direction == "bwd":
        call.prepared()
    d_out = call.named("dO", case.input_specs()["dO"].shape, case.dtype)
    gradients = flash._flash_attn_bwd(q, k, v, out, d_out, lse, **options)
    for gradient, name in zip(gradients, ("dQ", "dK", "dV"), strict=True):
        call.rename(gradient, name)


@contextmanager
def _accumulation(case: Gemm) -> Iterator[None]:
    """f8 without promotion where the case asks for it: QuACK's kernel has the switch, its functions do not pass it."""
    if case.acc != "fast":
        yield
        return
    kernel, caches = GemmSm90.__init__, (quack.gemm._compile_gemm.cache, quack.gemm._gemm_plan_cache)
    kept = [dict(cache) for cache in caches]
    for cache in caches:
        cache.clear()  # the switch is not part of their keys
    GemmSm90.__init__ = partialmethod(kernel, fp8_fast_accum=True)
    try:
        yield
    finally:
        GemmSm90.__init__ = kernel
        for cache, contents in zip(caches, kept, strict=True):
            cache.clear()
            cache.update(contents)


def multiply(case: Gemm, choice: dict[str, Any], call: Call) -> None:
    """C by QuACK."""
    config = GemmConfig(is_dynamic_persistent=False, **choice)
    specs = case.input_specs()
    a, b = (call.named(name, specs[name].shape, case.dtype) for name in "AB")
    a, b = (t.mT if stored == "t" else t for t, stored in zip((a, b), case.layout, strict=True))
    c = call.named("C", case.output_specs()["C"].shape, case.out)
    if case.epilogue in ("bias+relu", "bias+gelu"):
        bias = call.named("bias", specs["bias"].shape, case.out)
        activation = {"bias+relu": "relu", "bias+gelu": "gelu_tanh_approx"}[case.epilogue]
        quack.gemm_interface.gemm_act(
            a, b, bias=bias, activation=activation, postact_out=c, store_preact=False, tuned=False, config=config
        )
        return
    more: dict[str, Any] = {}
    if case.epilogue == "bias":
        more["bias"] = call.named("bias", specs["bias"].shape, case.out)
    if case.epilogue == "residual":
        more["C"] = call.named("residual", specs["residual"].shape, case.out)
    if case.groups is not None:
        # First rows of the groups, and the number of rows: QuACK's name for the sizes. Made when inputs are loaded.
        more["cu_seqlens_m"] = call.named("ends", (len(case.groups) + 1,), "i32")
    with _accumulation(case):
        quack.gemm_interface.gemm_tuned.fn(a, b, c, config=config, split_k=config.split_k, **more)
