"""What attention's kernels do with the accumulators of a warpgroup: products, masks, the online softmax.

An accumulator of 64 rows is spread over a warpgroup as wgmma leaves it (PTX ISA, "Register Fragments for
wgmma.mma_async.m64nNk16"): a thread holds two rows, 8 apart, and in every 8 columns two neighbours of each. So a row
belongs to four threads side by side. Registers in that order are also the operand A of the next product.

These functions are called while the DSL traces a kernel, and their loops are unrolled by Python.
"""

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

WARPGROUP = 128
# Rows of a thread, and threads that share a row.
_HELD = 2
_SHARING = 4
# Accumulators of a row's maximum and sum: chains of dependent operations become as much shorter.
_CHAINS = 4


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


def softmax(s: cute.Tensor, most: cute.Tensor, sums: cute.Tensor, scale: Float32, first: bool, careful: bool) -> list:
    """Scores become probabilities under the rows' new maxima; what earlier sums are to be multiplied by is returned.

    Args:
        s: scores of a block of keys, times ``scale`` in base 2.
        most: maximum of each row so far.
        sums: sum over the thread's own columns so far; ``finish`` adds up those of four threads.
        first: there is nothing so far.
        careful: a row may not have seen any key yet.
    """
    rows = by_rows(s)
    columns = cute.size(rows, mode=[1])
    fades = []
    for r in range(_HELD):
        chains = [rows[r, c] for c in range(_CHAINS)]
        for c in range(_CHAINS, columns):
            chains[c % _CHAINS] = cute.arch.fmax(chains[c % _CHAINS], rows[r, c])
        peak = cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))
        peak = cute.arch.warp_reduction_max(peak, threads_in_group=_SHARING)
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
    return fades


def rescale(o: cute.Tensor, factors: list) -> None:
    """Every row times its factor."""
    rows = by_rows(o)
    for r in range(_HELD):
        for c in range(cute.size(rows, mode=[1])):
            rows[r, c] = rows[r, c] * factors[r]


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


def hold(sums: cute.Tensor) -> None:
    """What the sums depend on is computed before anything that follows.

    ptxas would otherwise sink the exponentials below the next wait for a product. A barrier of a warp with itself,
    whose mask (all lanes, since sums of probabilities are not negative) hangs on the values.
    """
    cute.arch.inline_ptx(
        "{ .reg .b32 m; mov.b32 m, {$r0}; shr.u32 m, m, 31; sub.u32 m, 0xffffffff, m; bar.warp.sync m; }",
        read_only_args=[sums[0] + sums[1]],
    )


def exp2(x: Float32) -> Float32:
    """The special function unit's power of two, denormals flushed."""
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])
