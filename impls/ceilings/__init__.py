"""Measured ceilings: multiply-adds per dtype, exponentials, bandwidth per memory level, the least call.

Owns which sizes and repeats are worth measuring, on a CPU and on a GPU. What each
probe computes is defined by ``impls.workloads.ceiling``; modules here say which of them run. ``kernels`` holds how on a
CPU: LLVM IR written by hand, compiled for the host by llvmlite (wheels on PyPI: nobody needs a compiler), run on one
pinned thread per CPU; ``cuda`` holds how on a GPU.

Why not an existing tool, on a CPU:

- ``carm-roofline`` 1.5 (PyPI) writes, compiles and runs micro-benchmarks for load, store, add and FMA in f32, f64 and
  bf16 (AVX-512 BF16). It needs a C compiler on the user's machine; it has no i8 dot products, no AMX, no exponentials;
  and its results come out of a process of its own: they cannot be judged, nor measured in turn with the implementations
  that they are held against. It serves as a second opinion: on two cores of a Zen 4 it gave 471 GFLOP/s in bf16 (here
  466), reading 427 GB/s from L1 (432), 215 from L2 (232), 128 from L3 (184), 38 from 256 MiB (35), but 52 from memory
  by its own choice of size, four times the L3, which is why main memory is probed by more here.
- ``pylikwid`` (PyPI) wraps LIKWID's libraries, which must be installed with rights to read performance counters; its
  ``likwid-bench`` is not part of it.
- STREAM is a C source without a package; of it, the counting rule for copies is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from impls.workloads.ceiling import EXP_DTYPES, RATE_DTYPES, Ceiling

_PAGE = 4096
_MIB, _GIB = 1 << 20, 1 << 30

# Repeats per thread that take about 20 to 80 ms on a core of 2023 (AVX-512; with AMX a tenth), so that waking the team,
# which takes some 50 us, stays under 1 % of the time.
_RATE_REPEATS = {"f64": 1 << 12, "f32": 1 << 13, "i8": 1 << 16}
_NARROW_REPEATS = 1 << 15
_EXP_REPEATS = 1 << 15
# Bytes that a thread reads, or reads and writes, in one call: 20 to 100 ms at the bandwidth of each level.
_TRAFFIC = {"L1d": 4 * _GIB, "L2": 2 * _GIB, "L3": _GIB}


def cpu_ceiling_cases(caches: Mapping[str, int], threads: int, dtypes: Iterable[str]) -> list[Ceiling]:
    """The ceilings worth measuring on a CPU.

    A cache is probed by a working set of half its size; where that would fit the caches above it (an L3 hardly larger
    than all L2), by all that is above and half of it. Main memory is probed by four times the L3, but not less than
    256 MiB (a virtual machine may see less than the L3 it is served from) nor more than 1 GiB, unless that is less than
    twice the L3. A copy's working set is its source and its destination.

    Args:
        caches: bytes of ``L1d``, ``L2``, ``L3`` that all threads can use together; absent levels are left out.
        threads: threads that the work is split over.
        dtypes: dtypes whose rates are wanted; those that the rate probe does not know are left out.
    """
    cases = [Ceiling("launch"), Ceiling("exp", dtype=EXP_DTYPES[0], repeats=_EXP_REPEATS * threads)]
    cases += [
        Ceiling("rate", dtype=d, repeats=_RATE_REPEATS.get(d, _NARROW_REPEATS) * threads)
        for d in dict.fromkeys(dtypes)
        if d in RATE_DTYPES
    ]
    above = 0
    for level, traffic in _TRAFFIC.items():
        if size := caches.get(level, 0):
            half = size // 2
            cases += _both(half if half > above else above + half, traffic * threads)
            above = size
    last = caches.get("L3", 0)
    return cases + _both(max(min(4 * last, _GIB), 2 * last, 256 * _MIB), threads * _GIB // 2)


# Repeats that take some 3 ms on an H200: long against the last block's work, short enough to run at full clocks.
_GPU_RATE_REPEATS = {"f32": 6 << 16, "tf32": 40 << 16, "f16": 80 << 16, "bf16": 80 << 16}
_GPU_NARROW_REPEATS = 160 << 16
_GPU_EXP_REPEATS = 40 << 16
# Bytes of one cold pass: R(bytes), from a decode step's activations to the caches of keys and values of 64 sequences.
# Larger ones would tell little more and cost a first run a minute.
_GPU_SIZES_MIB = (1, 8, 32, 128, 512, 2048)
# Working sets that stay in L2 (50 MiB of an H100 or H200, in two halves), gone over until 2 GiB have moved.
_GPU_L2_MIB = (4, 24)


def gpu_ceiling_cases(dtypes: Iterable[str]) -> list[Ceiling]:
    """The ceilings worth measuring on a GPU: rates, exponentials, the launch, single cold passes by size, and L2.

    The rate of f32 is always among them: what surrounds the products of any dtype is computed there.
    """
    cases = [Ceiling("launch"), Ceiling("exp", dtype=EXP_DTYPES[0], repeats=_GPU_EXP_REPEATS)]
    cases += [
        Ceiling("rate", dtype=d, repeats=_GPU_RATE_REPEATS.get(d, _GPU_NARROW_REPEATS))
        for d in dict.fromkeys([*dtypes, "f32"])
        if d in RATE_DTYPES and d != "f64"
    ]
    cases += [Ceiling("read", bytes=size * _MIB, repeats=1) for size in _GPU_SIZES_MIB]
    cases += [Ceiling("copy", bytes=size * _MIB // 2, repeats=1) for size in _GPU_SIZES_MIB]
    return cases + [case for size in _GPU_L2_MIB for case in _both(size * _MIB, 2 * _GIB)]


def _both(working_set: int, traffic: int) -> list[Ceiling]:
    """Read and copy with this working set; ``traffic`` is what all repeats move together, at least one sweep."""
    size = max(2 * _PAGE, working_set // (2 * _PAGE) * (2 * _PAGE))
    repeats = max(1, traffic // size)
    return [Ceiling("read", bytes=size, repeats=repeats), Ceiling("copy", bytes=size // 2, repeats=repeats)]
