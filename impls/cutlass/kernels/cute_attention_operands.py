"""Attention's tensors in memory, and the two products of the forward kernels with their operands in shared memory.

These functions are called while the DSL traces a host function.
"""

from cutlass import Float32, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from impls.cutlass.cute_attention import ROWS, DecodeTiles, ForwardTiles


def by_heads(rows, heads, d, batch) -> cute.Layout:
    """(rows, d, heads, batch) of a contiguous tensor (batch, rows, heads, d)."""
    return cute.make_layout((rows, d, heads, batch), stride=(heads * d, 1, d, rows * heads * d))


def turned(layout: cute.Layout) -> cute.Layout:
    """``by_heads`` as (d, rows, heads, batch)."""
    return cute.select(layout, mode=[1, 0, 2, 3])


def products(dtype, t: ForwardTiles | DecodeTiles, query_slots: int):
    """A warpgroup's Q K^T and P V, whose P comes from registers, and the layouts of Q, K and V in shared memory."""
    k, n = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
    mma_qk = hopper.make_trivial_tiled_mma(dtype, dtype, k, k, Float32, (1, 1, 1), (ROWS, t.keys))
    mma_pv = hopper.make_trivial_tiled_mma(
        dtype, dtype, k, n, Float32, (1, 1, 1), (ROWS, t.head), warpgroup.OperandSource.RMEM
    )
    scores, values = (ROWS, t.keys, t.head), (ROWS, t.head, t.keys)
    q_layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, scores, dtype, query_slots)
    k_layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, scores, dtype, t.stages)
    v_layout = hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, values, dtype, t.stages)
    return mma_qk, mma_pv, q_layout, k_layout, v_layout
