"""Which epilogues XLA is asked to put into cuBLASLt's kernel, and whether its answer is understood."""

from __future__ import annotations

import pytest

from impls.support.h200 import H200
from impls.workloads.base import parse_case
from impls.xla.gemm import CublasLt, epilogue_within


def call(beta: int, epilogue: str, target: str = "__cublas$lt$matmul") -> str:
    """A line as XLA of JAX 0.11 writes it, shortened."""
    return (
        f"  %cublas-lt-matmul.3 = (bf16[61,128]{{1,0}}, s8[33554432]{{0}}) custom-call(%A.1, %B.1, %bias.1), "
        f'custom_call_target="{target}", backend_config={{"gemm_backend_config":{{"alpha_real":1,"beta":{beta},'
        f'"precision_config":{{"operand_precision":["DEFAULT","DEFAULT"]}},"epilogue":"{epilogue}","grad_x":false}}}}\n'
    )


@pytest.mark.parametrize(
    ("hlo", "found"),
    [
        (call(0, "BIAS_GELU"), "BIAS_GELU"),
        (call(0, "BIAS", target="__cublas$lt$matmul$f8"), "BIAS"),
        (call(1, "DEFAULT"), "MATRIX"),
        (call(0, "DEFAULT"), None),
        (call(0, "BIAS") + call(0, "DEFAULT"), None),
        ("  ROOT %fusion = bf16[61,67]{1,0} fusion(%A.1, %B.1), kind=kCustom, calls=%gemm_fusion\n", None),
    ],
)
def test_the_epilogue_is_read_from_the_call(hlo: str, found: str | None) -> None:
    assert epilogue_within("HloModule jit_f\n\nENTRY %main {\n" + hlo + "}\n") == found


@pytest.mark.parametrize(
    ("case", "refused"),
    [
        ("4096x4096x4096:bf16:bias+gelu", False),
        ("b3x33x31x47:f8e4m3:bias+relu", False),
        ("64x64x64:f32:residual", False),
        ("4096x4096x4096:bf16", True),
        ("64x64x64:i8:bias", True),
        ("1x65x33:bf16:nt:bias", True),
        ("64x1x33:f16:residual", True),
    ],
)
def test_what_xla_gives_no_epilogue_is_refused(case: str, refused: bool) -> None:
    assert (CublasLt().refuses(parse_case(f"gemm:{case}"), H200) is not None) == refused
