"""What attention's kernels do with the accumulators of a warpgroup: products, masks, the online softmax.

An accumulator of 64 rows is spread over a warpgroup as wgmma leaves it (PTX ISA, "Register Fragments for
wgmma.mma_async.m64nNk16"): a thread holds two rows, 8 apart, and in every 8 columns two neighbours of each. So a row
belongs to four threads side by side. Registers in that order are also the operand A of the next product.

These functions are called while the DSL traces a kernel, and their loops are unrolled by Python.
"""

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

# Rows of a thread, and threads that share a row.
_HELD = 2
_SHARING = 4
# Accumulators of a row's maximum and sum: chains of dependent operations become as much shorter.
_CHAINS = 4
# Powers of two that a row's maximum may grow by before it is taken up, where that is put off.
_LAZY = 8.0


def multiply(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, fresh: bool) -> None:
    """Starts acc = A B (``fresh``) or acc += A B as one group of wgmma; ``warpgroup.wait_group`` waits for it."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    for step in range(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, not (fresh and step == 0))
        cute.gemm(atom, acc, a[None, None, step], b[None, None, step], acc)
    warpgroup.commit_group()


def by_rows(acc: cute.Tensor) -> cute.Tensor:
    """The accumulator as (a thread's rows, its columns)."""
    columns = cute.size(acc) // _HELD
    return cute.make_tensor(acc.iterator, cute.make_layout((_HELD, (2, columns // 2)), stride=(2, (1, 4))))


def hide(s: cute.Tensor, last, since, windowed: bool) -> None:
    """Scores become minus infinity where a key is hidden.

    Args:
        s: scores of a block of keys.
        last: of each of the thread's rows the last visible key, relative to the block's first and the thread's column.
        since: likewise the last key that is hidden before the visible ones; read where ``windowed``.
    """
    rows = by_rows(s)
    for r in range(_HELD):
        for c in range(cute.size(rows, mode=[1])):
            key = c // 2 * 8 + c % 2
            visible = last[r] >= key
            if windowed:
                visible = visible & (since[r] < key)
            rows[r, c] = Float32(cutlass.select_(visible, rows[r, c], Float32(float("-inf"))))


def softmax(
    s: cute.Tensor, most: cute.Tensor, sums: cute.Tensor, scale: Float32, first: bool, careful: bool, lazy: bool
):
    """Scores become probabilities under the rows' maxima; earlier sums are to be multiplied by what is returned.

    Args:
        s: scores of a block of keys, times ``scale`` in base 2.
        most: maximum of each row so far.
        sums: sum over the thread's own columns so far; ``finish`` adds up those of four threads.
        first: there is nothing so far.
        careful: a row may not have seen any key yet.
        lazy: a warp's maxima stay as they are until one of its rows grows by more than 2^8, so that earlier sums are
            seldom multiplied (FlashAttention-4's rescaling); f32 sums and f16 probabilities have room for that.

    Returns:
        A factor for each row, and a condition under which they are not 1; None where that is always to be expected.
    """
    rows = by_rows(s)
    columns = cute.size(rows, mode=[1])
    grown, peaks = None, []
    if lazy and not first:
        peaks = [_peak(rows, r) for r in range(_HELD)]
        over = [(peaks[r] - most[r]) * scale > Float32(_LAZY) for r in range(_HELD)]
        grown = cute.arch.vote_any_sync(over[0] | over[1])
    fades = []
    for r in range(_HELD):
        if grown is not None:
            peak = Float32(cutlass.select_(grown, cute.arch.fmax(peaks[r], most[r]), most[r]))
        else:
            peak = _peak(rows, r)
            if not first:
                peak = cute.arch.fmax(peak, most[r])
        base = peak * scale
        if careful:
            base = Float32(cutlass.select_(peak == -Float32.inf, Float32(0.0), base))
        fade = None if first else exp2(most[r] * scale - base)
        parts = [None] * _CHAINS
        for c in range(columns):
            rows[r, c] = p = exp2(rows[r, c] * scale - base)
            parts[c % _CHAINS] = p if parts[c % _CHAINS] is None else parts[c % _CHAINS] + p
        total = (parts[0] + parts[1]) + (parts[2] + parts[3])
        sums[r] = total if first else sums[r] * fade + total
        most[r] = peak
        fades.append(fade)
    return fades, grown


def _peak(rows: cute.Tensor, r: int) -> Float32:
    """The largest score of a row, for the four threads that share it."""
    chains = [rows[r, c] for c in range(_CHAINS)]
    for c in range(_CHAINS, cute.size(rows, mode=[1])):
        chains[c % _CHAINS] = cute.arch.fmax(chains[c % _CHAINS], rows[r, c])
    peak = cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))
    return cute.arch.warp_reduction_max(peak, threads_in_group=_SHARING)


def rescale(o: cute.Tensor, factors: list) -> None:
    """Every row times its factor."""
    rows = by_rows(o)
    for r in range(_HELD):
        for c in range(cute.size(rows, mode=[1])):
            rows[r, c] = rows[r, c] * factors[r]


@cute.jit
def rescale_where(o: cute.Tensor, grown, upper: Float32, lower: Float32):
    """Both rows times their factors, where the condition holds."""
    if grown:
        rescale(o, [upper, lower])


def finish(sums: cute.Tensor) -> list:
    """The sum of each row over all columns."""
    return [cute.arch.warp_reduction_sum(sums[r], threads_in_group=_SHARING) for r in range(_HELD)]


def narrow(wide: cute.Tensor, narrow_: cute.Tensor) -> None:
    """f32 to f16 or bf16 in the order of the registers."""
    pairs = cute.recast_tensor(cute.make_tensor(narrow_.iterator, cute.make_layout(cute.size(narrow_))), Int32)
    flat = cute.make_tensor(wide.iterator, cute.make_layout(cute.size(wide)))
    for i in range(cute.size(pairs)):
        pairs[i] = pack(flat[2 * i], flat[2 * i + 1], narrow_.element_type)


def pack(low: Float32, high: Float32, dtype) -> Int32:
    """Two numbers in ``dtype``, f16 or bf16, in one register."""
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Int32], read_only_args=[low, high]
    )


def unpack(pair: Int32, dtype) -> tuple:
    """Two numbers in ``dtype``, f16 or bf16, out of one register, as f32."""
    halves = ("cvt.f32.f16 {$w0}, a;", "cvt.f32.f16 {$w1}, b;")
    if dtype is cutlass.BFloat16:
        halves = ("mov.b32 {$w0}, {zero, a};", "mov.b32 {$w1}, {zero, b};")
    return cute.arch.inline_ptx(
        "{ .reg .b16 a, b, zero; mov.b16 zero, 0; mov.b32 {a, b}, {$r0}; " + " ".join(halves) + " }",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def exp2(x: Float32) -> Float32:
    """The special function unit's power of two, denormals flushed."""
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])
