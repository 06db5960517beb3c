"""The awkward grid: small cases that every implementation computes or refuses in a sentence.

Owns which cases these are, not how they are run. Shapes are small, so that hundreds of them run in a minute; what is
awkward about them is said beside them.
"""

from __future__ import annotations

from impls.workloads.base import Case, parse_case

# 127, 131, 137 are primes; 61 x 67 x 71 are primes under one tile.
_GEMM_DTYPES = (
    *("f32", "tf32", "f16", "f16:acc=f16", "f16:out=f32", "bf16", "bf16:out=f32"),
    *("f8e4m3", "f8e4m3:acc=fast", "f8e4m3:out=f16", "f8e4m3:out=f32", "i8"),
)
_EPILOGUES = ("bias", "bias+relu", "bias+gelu", "residual")


def _gemm() -> list[str]:
    cases = []
    for dtype in _GEMM_DTYPES:
        # Whole tiles; primes; K no multiple of anything; K long, so that an accumulator's width shows.
        cases += [f"{shape}:{dtype}" for shape in ("128x256x64", "127x131x137", "64x48x33", "33x17x1029")]
        # Every layout on a shape that tells its axes apart.
        cases += [f"33x65x47:{dtype}:{layout}" for layout in ("nt", "tn", "tt")]
    for dtype in ("f32", "f16", "bf16", "f8e4m3", "i8"):
        # One element; one row, column and both; K of one.
        cases += [f"{shape}:{dtype}" for shape in ("1x1x1", "1x65x33", "129x1x17", "1x1x257", "64x64x1")]
        cases += [f"1x{n}x48:{dtype}:{layout}" for n, layout in ((64, "nt"), (65, "tt"))]
        for epilogue in _EPILOGUES:
            if dtype == "i8" and epilogue == "bias+gelu":
                continue  # not a case
            cases += [f"61x67x71:{dtype}:{epilogue}", f"1x65x33:{dtype}:nt:{epilogue}"]
            cases += [f"b3x33x31x47:{dtype}:{epilogue}"]
        cases += [f"61x67x71:{dtype}:{layout}:{_EPILOGUES[1]}" for layout in ("nt", "tn", "tt")]
        # A wide N: another path where small N take one of their own.
        cases += [f"17x600x31:{dtype}:{layout}:residual" for layout in ("tn", "tt")]
        cases += [
            f"b{b}x{shape}:{dtype}:{layout}"
            for b, shape in ((2, "1x1x1"), (3, "33x31x47"), (7, "64x16x32"))
            for layout in ("nn", "tt")
        ]
        # Ragged groups, an empty one among them, one row, one group; K long enough for a path of its own.
        cases += [
            f"g{groups}:{dtype}{layout}"
            for groups in ("5+0+1+31x33x65", "64x32x32", "0+17+48x65x1031")
            for layout in ("", ":nt")
        ]
    # Rows of whole 16 bytes, as TMA wants them, and tiles in part; with a batch each matrix ends within a tile.
    cases += [f"144x208x176:{dtype}:{layout}" for dtype in ("tf32", "bf16", "f8e4m3", "i8") for layout in ("nn", "tt")]
    cases += [f"b3x80x144x112:{dtype}:nt:residual" for dtype in ("f16", "f8e4m3")]
    cases += ["b2x128x144x128:bf16:tn:bias+gelu", "g0+70+3x144x112:bf16:nt"]
    return [f"gemm:{case}" for case in cases]


def _attention() -> list[str]:
    cases = []
    for dtype in ("f32", "f16", "bf16"):
        # Whole tiles; primes and GQA 7:1; fewer keys than queries.
        shapes = ("b2h3s64d64", "b1h7kv1s61d96", "b2h4kv2q70k33d64")
        # Causal and windows, Sq = Sk and Sq < Sk; a prime, batch, GQA 7:1.
        masked = [f"{s}:{dtype}:{m}" for s in ("b1h2s67d64", "b2h14kv2q33k70d64") for m in ("causal", "window=16")]
        cases += [f"{shape}:{dtype}{direction}" for shape in shapes for direction in ("", ":bwd")]
        cases += [*masked, *(f"{case}:bwd" for case in masked[1:3])]
        # Decode: one query, many keys; 1:1, 8:1 and 7:1; as many keys as queries; windows of one key and of many.
        cases += [f"{shape}:{dtype}:causal" for shape in ("b2h4q1k257d64", "b1h8kv1q1k64d128", "b1h2s1d64")]
        cases += [f"b2h14kv2q1k257d96:{dtype}:window={w}" for w in (1, 100)]
        cases += [f"b1h2s50d{d}:{dtype}:causal" for d in (96, 128, 256)]
    for direction in ("", ":bwd"):
        # One query and one key; head sizes; windows of one key and of all but one, Sq = Sk and Sq < Sk.
        cases += [f"{shape}:f32{direction}" for shape in ("b1h1s1d64", "b1h2s40d96", "b1h2s40d256")]
        cases += [f"{s}d64:f32:window={w}{direction}" for s in ("b1h2s67", "b2h2q31k67") for w in (1, 66)]
        # A window far shorter than the sequence, which may be cut into bands, and more queries than are taken at a time
        # where they are taken in chunks: the last band or chunk is not whole.
        cases += [f"b1h4kv2q170k431d64:f32:window=40{direction}", f"b2h4kv2q150k190d64:f32:causal{direction}"]
        cases += [f"b3h14kv2q1k129d128:bf16:causal{direction}"]
    cases += ["b1h4kv2s300d64:bf16:window=40", "b1h2s300d64:bf16", "b1h2s64d64:tf32"]
    cases += ["b1h7kv1s61d96:bf16:fwdbwd", "b2h14kv2q33k70d64:f32:causal:fwdbwd", "b2h4q1k65d64:f16:fwdbwd"]
    return [f"attention:{case}" for case in cases]


def _ceiling() -> list[str]:
    cases = [f"rate:{dtype}:repeats=128" for dtype in ("f32", "tf32", "f16", "bf16", "f8e4m3", "i8")]
    cases += [f"exp:{dtype}:repeats=64" for dtype in ("f32", "f16", "bf16")]
    cases += [f"{probe}:{size}:repeats=3" for probe in ("read", "copy") for size in ("4KiB", "1028KiB")]
    # Beyond every cache, where copies may bypass them.
    return [f"ceiling:{case}" for case in (*cases, "copy:64MiB:repeats=1", "launch")]


# Of a stack that compiles every case for a second or more, an implementation takes each n-th case of its workload only,
# so that the stack's tests take minutes; ``--whole-grid`` runs all. n is odd, so that layouts and masks, which
# alternate, come up. max_autotune shares its code with default but for the products that Inductor races.
EACH_NTH = {
    "torch_compile.default": 9,
    "torch_compile.linear": 7,
    "torch_compile.sdpa": 9,
    "torch_compile.flex": 11,
    "torch_compile.aot_eager": 13,
    "torch_compile.max_autotune": 23,
    "torch_compile.max_autotune_tma": 23,
    "torch_compile.flex_max_autotune": 23,
    "torch_compile.reduce_overhead": 11,
    "iree.llvm_cpu": 7,
    "iree.linalg_ext": 5,
    "iree.stablehlo": 7,
    "iree.symbolic": 7,
    "iree.vmvx": 11,
    "iree.vulkan": 11,
    "pallas.mosaic_gpu": 17,
    "pallas.triton": 11,
    "pallas.tpu": 23,
    "xla.dot_product_attention": 3,
    "xla.stablehlo": 3,
    "tvm.tensorir": 5,
    "tvm.relax": 7,
    "tvm.symbolic": 7,
    "tvm.metaschedule": 7,
    "triton.tiled": 9,
    "triton.persistent": 13,
    "triton.split_k": 9,
    "triton.persistent_tma": 5,
    "triton.persistent_tma_ws": 7,
    "triton.grouped": 5,
    "triton.flash": 9,
    "triton.flash_tma": 13,
    "triton.decode": 5,
}


def thinned(cases: list[Case], name: str) -> list[Case]:
    """Those cases, all of one workload, that implementation ``name`` takes."""
    return cases[:: EACH_NTH.get(name, 1)]


def cases() -> list[Case]:
    """Every case of the grid, parsed, no two alike."""
    return list(dict.fromkeys(parse_case(case) for case in (*_gemm(), *_attention(), *_ceiling())))
