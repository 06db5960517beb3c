"""Block sizes: whatever the shape, they cover it, fit the registers and share the work out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from impls.tvm.tiling import Tiling, VectorUnit, choose, register_tiles

UNITS = st.sampled_from([VectorUnit(16, 32), VectorUnit(8, 16), VectorUnit(4, 32, temporaries=4)])
SIZES = st.integers(1, 5000)
L2 = 1 << 20


def chosen(m: int | None, n: int, words: int, batch: int, threads: int, unit: VectorUnit, whole_k: bool) -> Tiling:
    return choose(m, n, words, batch=batch, threads=threads, unit=unit, l2_bytes=L2, whole_k=whole_k)


@given(SIZES, SIZES, SIZES, st.integers(1, 9), st.integers(1, 64), UNITS, st.booleans())
def test_covers_the_shape_and_fits_the_machine(
    m: int, n: int, words: int, batch: int, threads: int, unit: VectorUnit, whole_k: bool
) -> None:
    t = chosen(m, n, words, batch, threads, unit, whole_k)
    assert t.panels is not None
    assert t.panels * t.row_chunks * t.mr >= m
    assert t.column_blocks * t.block_panels * t.nr >= n
    assert t.kc * t.k_blocks >= words
    assert t.kc % t.unroll == 0
    assert t.mr * t.nv + t.nv + unit.temporaries <= unit.registers
    assert t.k_blocks == 1 or not whole_k
    if not whole_k and t.block_panels > 1:
        assert 4 * t.kc * t.nr * t.block_panels <= L2 // 2
    assert not t.parallel or threads > 1


@given(SIZES, SIZES, UNITS)
def test_one_tiling_serves_every_m(n: int, words: int, unit: VectorUnit) -> None:
    t = chosen(None, n, words, 1, 2, unit, False)
    assert t.panels is None
    assert t.column_blocks * t.block_panels * t.nr >= n


@given(st.integers(64, 4000), st.integers(256, 4000), st.integers(64, 4000))
def test_little_is_computed_beyond_the_shape(m: int, n: int, words: int) -> None:
    """From 64 x 256 on, padding costs less than a fifth: there are enough tile shapes to choose from."""
    t = chosen(m, n, words, 1, 2, VectorUnit(16, 32), False)
    assert t.panels is not None
    padded = t.panels * t.row_chunks * t.mr * t.column_blocks * t.block_panels * t.nr * t.kc * t.k_blocks
    assert padded < 1.2 * m * n * words


def test_large_squares_take_a_tile_that_fills_the_registers() -> None:
    """At least 24 sums in flight, so that two multiply-adds a cycle of latency 4 never wait."""
    t = chosen(1024, 1024, 1024, 1, 2, VectorUnit(16, 32), False)
    assert t.mr * t.nv >= 24
    assert t.parallel
    assert (t.column_blocks * t.row_chunks) % 2 == 0


def test_small_products_stay_on_one_thread() -> None:
    t = chosen(16, 16, 16, 1, 64, VectorUnit(16, 32), False)
    assert not t.parallel
    assert not t.parallel_pack


def test_batches_are_shared_out_whole() -> None:
    t = chosen(256, 256, 256, 64, 2, VectorUnit(16, 32), False)
    assert t.tasks_over == "batch"
    assert t.row_chunks == 1


def test_every_register_tile_has_two_rows_at_least() -> None:
    assert min(mr for mr, _ in register_tiles(VectorUnit(8, 16))) == 2
    assert max(mr * nv for mr, nv in register_tiles(VectorUnit(16, 32))) == 30
