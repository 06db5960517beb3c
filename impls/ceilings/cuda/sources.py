"""CUDA C++ of the probes, for sm_90a.

Owns the kernels' text. All end alike: every block adds its share to totals in memory (integers, so that the order does
not matter; doubles for exponentials), and the last block to arrive writes the output and clears the totals for the next
call. Arguments are 64 bits wide.

The tensor-core kernel keeps both operands in shared memory, 128-byte rows with the 128-byte swizzle that ``wgmma``
reads, and accumulators in registers: m64n256, B's 64 columns four times, so that each instruction does four repeats and
shared memory is read at 80 of 128 bytes a cycle. Two warpgroups take turns, so that one's conversions hide behind the
other's products; f8, whose accumulators are converted most often, takes four of half the width. 8-bit operands are laid
twice along K, which fills the 128-byte row and does two repeats more at once.
"""

from __future__ import annotations

from dataclasses import dataclass

_FINISH = r"""
// True in all threads of the block that arrives last.
__device__ bool last_block(unsigned long long *ticket) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(ticket, 1ull) == gridDim.x - 1;
    __syncthreads();
    if (last) { __threadfence(); if (threadIdx.x == 0) *ticket = 0; }
    return last;
}
"""

_ROWS, _ROW_BYTES = 64, 128


@dataclass(frozen=True)
class Wgmma:
    """One instruction shape of the rate probe.

    Attributes:
        name: what follows m64n<columns> in its mnemonic.
        tail: immediates after the descriptors.
        blocks: 128-byte blocks along K that an operand's 64 elements fill.
        copies: how often the operands are laid along K.
        flush: iterations after which accumulators are converted, so that they stay exact; 0 for never.
        columns: of the instruction; B's 64 columns fill them several times.
    """

    name: str
    tail: str
    blocks: int
    copies: int
    flush: int
    columns: int = 256

    @property
    def repeats(self) -> int:
        """Repeats of the case's product in one iteration over K."""
        return self.columns // 64 * self.copies

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a multiprocessor: as many as its registers hold accumulators for."""
        return 512 // self.columns

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory: both operands, and room to align them to 1024."""
        return (_ROWS + self.columns) * _ROW_BYTES * self.blocks + 1024


# With operands in [-63, 63], four columns' sums of 16 repeats stay below 4 * 16 * 64 * 63^2 < 2^24. f8 in [-7, 7] in
# an accumulator of 14 bits: four repeats, 4 * 64 * 7^2 < 2^14 (see impls.workloads.ceiling).
WGMMA = {
    "f16": Wgmma("k16.f32.f16.f16", ", p, 1, 1, 0, 0", 1, 1, 16),
    "bf16": Wgmma("k16.f32.bf16.bf16", ", p, 1, 1, 0, 0", 1, 1, 16),
    "tf32": Wgmma("k8.f32.tf32.tf32", ", p, 1, 1", 2, 1, 16),
    "f8e4m3": Wgmma("k32.f32.e4m3.e4m3", ", p, 1, 1", 1, 2, 2, columns=128),
    "i8": Wgmma("k32.s32.s8.s8", ", p", 1, 2, 0),
}


def wgmma(shape: Wgmma) -> str:
    """``rate(A, B, totals, ticket, C, iterations)``: A and B are the images that ``layout`` makes."""
    kind, constraint = ("int", "r") if "s32" in shape.name else ("float", "f")
    held, threads = shape.columns // 2, 128 * shape.warpgroups
    a_bytes, b_bytes = _ROWS * _ROW_BYTES * shape.blocks, shape.columns * _ROW_BYTES * shape.blocks
    registers = ", ".join(f"%{i}" for i in range(held))
    outputs = ", ".join(f'"+{constraint}"(d[{i}])' for i in range(held))
    body = f"{{ .reg .pred p; setp.ne.b32 p, %{held + 2}, 0; "
    body += f"wgmma.mma_async.sync.aligned.m64n{shape.columns}{shape.name} "
    body += f"{{{registers}}}, %{held}, %{held + 1}{shape.tail}; }}"
    convert = " + ".join(f"d[j + {i}]" for i in range(0, held, 32))
    if kind == "float":
        convert = f"__float2int_rn({convert})"
    return (
        _FINISH
        + rf"""
__device__ __forceinline__ void mma({kind} (&d)[{held}], unsigned long long a, unsigned long long b, int keep) {{
    asm volatile("{body}" : {outputs} : "l"(a), "l"(b), "r"(keep));
}}

extern "C" __global__ void __launch_bounds__({threads}, 1) rate(
    const uint4 *a, const uint4 *b, unsigned int *totals, unsigned long long *ticket, int *c,
    unsigned long long iterations) {{
    extern __shared__ unsigned char raw[];
    unsigned int base = (unsigned int)__cvta_generic_to_shared(raw);
    unsigned int aligned = (base + 1023) & ~1023u;
    uint4 *shared = (uint4 *)(raw + (aligned - base));
    const int a_words = {a_bytes // 16};
    const int b_words = {b_bytes // 16};
    for (int i = threadIdx.x; i < a_words; i += {threads}) shared[i] = a[i];
    for (int i = threadIdx.x; i < b_words; i += {threads}) shared[a_words + i] = b[i];
    asm volatile("fence.proxy.async.shared::cta;");
    __syncthreads();
    // Matrix descriptor: address, 1024 bytes between groups of eight rows, 128-byte swizzle (PTX ISA, wgmma).
    unsigned long long form = (1ull << 62) | (64ull << 32) | (1ull << 16);
    unsigned long long at = form | ((aligned & 0x3ffff) >> 4);
    unsigned long long bt = form | (((aligned + {a_bytes}) & 0x3ffff) >> 4);
    unsigned int worker = {shape.warpgroups} * blockIdx.x + threadIdx.x / 128, workers = {shape.warpgroups} * gridDim.x;
    unsigned long long mine = iterations / workers + (worker < iterations % workers);
    int sums[32];
    {kind} d[{held}];
    #pragma unroll
    for (int j = 0; j < 32; j++) sums[j] = 0;
    #pragma unroll
    for (int j = 0; j < {held}; j++) d[j] = 0;
    while (mine) {{
        unsigned long long chunk = {"mine" if shape.flush == 0 else f"mine < {shape.flush} ? mine : {shape.flush}"};
        for (unsigned long long u = 0; u < chunk; u++) {{
            asm volatile("wgmma.fence.sync.aligned;");
            #pragma unroll
            for (int block = 0; block < {shape.blocks}; block++) {{
                #pragma unroll
                for (int step = 0; step < 4; step++) {{
                    mma(d, at + block * {_ROWS * _ROW_BYTES // 16} + 2 * step,
                        bt + block * {shape.columns * _ROW_BYTES // 16} + 2 * step, u || block || step);
                }}
            }}
            asm volatile("wgmma.commit_group.sync.aligned;");
        }}
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        mine -= chunk;
        #pragma unroll
        for (int j = 0; j < 32; j++) sums[j] += {convert};
    }}
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    #pragma unroll
    for (int j = 0; j < 32; j++) {{
        int row = 16 * warp + lane / 4 + 8 * (j / 2 % 2), column = 8 * (j / 4) + 2 * (lane % 4) + j % 2;
        atomicAdd(&totals[64 * row + column], (unsigned int)sums[j]);
    }}
    if (last_block(ticket)) {{
        for (int i = threadIdx.x; i < 4096; i += {threads}) {{
            c[i] = __ldcg(&totals[i]) & 0x7fffffff;
            totals[i] = 0;
        }}
    }}
}}
"""
    )


FMA_THREADS = 512
#: ``multiply_add(A, B, totals, ticket, C, repeats)``: f32. Every block does its share of the repeats, a group of 64
#: threads one k at a time, a thread 8 x 8 elements of C: 16 operands and 64 accumulators stay in registers.
#:
#: Two FMA units per scheduler take an instruction every cycle, but registers come in two banks of one read per cycle.
#: In this order (two rows, to and fro) each FFMA shares an operand with the one before, from the operand reuse cache,
#: and reads 1.9 registers in place of 3 (SASS of CUDA 13.0); row by row it is 2.1 and more of them of one bank.
FMA = (
    _FINISH
    + r"""
extern "C" __global__ void __launch_bounds__(512, 1) multiply_add(
    const float *a, const float *b, unsigned int *totals, unsigned long long *ticket, int *c,
    unsigned long long repeats) {
    __shared__ unsigned int sums[64][64];  // element of a thread's 8 x 8, thread of a group: no bank conflicts
    for (int i = threadIdx.x; i < 4096; i += 512) sums[i / 64][i % 64] = 0;
    __syncthreads();
    int tile = threadIdx.x % 64, y = tile / 8 * 8, x = tile % 8 * 8;
    int mine = (int)(repeats / gridDim.x + (blockIdx.x < repeats % gridDim.x));
    for (int k = threadIdx.x / 64; k < 64; k += 8) {
        float u[8], v[8];
        #pragma unroll
        for (int i = 0; i < 8; i++) { u[i] = a[64 * (y + i) + k]; v[i] = b[64 * k + x + i]; }
        for (int left = mine; left > 0;) {
            // 4096 products of at most 63^2 stay below 2^24.
            int chunk = left < 4096 ? left : 4096;
            left -= chunk;
            float d[8][8] = {};
            #pragma unroll 8
            for (int r = 0; r < chunk; r++) {
                #pragma unroll
                for (int i = 0; i < 8; i += 2) {
                    #pragma unroll
                    for (int j = 0; j < 8; j++) {
                        int first = i + j % 2, second = i + 1 - j % 2;
                        d[first][j] = fmaf(u[first], v[j], d[first][j]);
                        d[second][j] = fmaf(u[second], v[j], d[second][j]);
                    }
                }
            }
            #pragma unroll
            for (int i = 0; i < 64; i++) atomicAdd(&sums[i][tile], (unsigned int)__float2int_rn(d[i / 8][i % 8]));
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 4096; i += 512) {
        int row = i % 64 / 8 * 8 + i / 512, column = i % 8 * 8 + i / 64 % 8;
        atomicAdd(&totals[64 * row + column], sums[i / 64][i % 64]);
    }
    if (last_block(ticket)) {
        for (int i = threadIdx.x; i < 4096; i += 512) { c[i] = __ldcg(&totals[i]) & 0x7fffffff; totals[i] = 0; }
    }
}
"""
)

EXP_THREADS = 256
#: ``exponentials(X, totals, ticket, Y, blocks)``: every thread one element, over its share of the blocks of 64 shifts.
EXP = (
    _FINISH
    + r"""
extern "C" __global__ void __launch_bounds__(256, 8) exponentials(
    const float *x, double *totals, unsigned long long *ticket, float *y, unsigned long long blocks) {
    unsigned int thread = blockIdx.x * 256 + threadIdx.x, slots = gridDim.x / 16, slot = thread / 4096;
    float scaled = x[thread % 4096] * 1.44269504f;
    unsigned long long mine = blocks / slots + (slot < blocks % slots);
    double total = 0;
    while (mine) {
        int chunk = mine < 128 ? (int)mine : 128;  // 2^13 terms
        mine -= chunk;
        float sum = 0;
        for (int u = 0; u < chunk; u++) {
            float moved = scaled;
            #pragma unroll 1
            for (int q = 0; q < 4; q++, moved -= 1.44269504f / 4) {
                #pragma unroll
                for (int r = 0; r < 16; r++) {
                    float e;
                    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(moved - r * (1.44269504f / 64)));
                    sum += e;
                }
            }
        }
        total += sum;
    }
    atomicAdd(&totals[thread % 4096], total);
    if (last_block(ticket)) {
        for (int i = threadIdx.x; i < 4096; i += 256) { y[i] = (float)__ldcg(&totals[i]); totals[i] = 0; }
    }
}
"""
)

STREAM_THREADS = 256
#: ``read(X, total, ticket, Y, words, repeats)`` and ``copy(X, Y, words, repeats)``, words of 16 bytes.
STREAM = (
    _FINISH
    + r"""
__device__ __forceinline__ uint4 load(const uint4 *p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

extern "C" __global__ void __launch_bounds__(256) read(
    const uint4 *x, unsigned int *total, unsigned long long *ticket, int *y, unsigned long long words,
    unsigned long long repeats) {
    unsigned int sum = 0;
    unsigned long long stride = gridDim.x * 2048ull, first = blockIdx.x * 2048ull + threadIdx.x;
    for (unsigned long long r = 0; r < repeats; r++) {
        unsigned long long i = first;
        for (; i + 7 * 256 < words; i += stride) {
            uint4 v[8];
            #pragma unroll
            for (int u = 0; u < 8; u++) v[u] = load(x + i + u * 256);
            #pragma unroll
            for (int u = 0; u < 8; u++) sum += v[u].x + v[u].y + v[u].z + v[u].w;
        }
        for (int u = 0; u < 8 && i < words; u++, i += 256) { uint4 v = load(x + i); sum += v.x + v.y + v.z + v.w; }
    }
    for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
    __shared__ unsigned int of_warp[8];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 8; w++) sum += of_warp[w];
        atomicAdd(total, sum);
    }
    if (last_block(ticket) && threadIdx.x == 0) { *y = __ldcg(total) & 0x7fffffff; *total = 0; }
}

extern "C" __global__ void __launch_bounds__(256) copy(
    const uint4 *x, uint4 *y, unsigned long long words, unsigned long long repeats) {
    unsigned long long stride = gridDim.x * 1024ull, first = blockIdx.x * 1024ull + threadIdx.x;
    for (unsigned long long r = 0; r < repeats; r++) {
        unsigned long long i = first;
        for (; i + 3 * 256 < words; i += stride) {
            uint4 v[4];
            #pragma unroll
            for (int u = 0; u < 4; u++) v[u] = load(x + i + u * 256);
            #pragma unroll
            for (int u = 0; u < 4; u++) y[i + u * 256] = v[u];
        }
        for (int u = 0; u < 4 && i < words; u++, i += 256) y[i] = load(x + i);
    }
}

extern "C" __global__ void launch(const int *x, int *y) { *y = *x; }
"""
)
