"""The rate probe's operands as registers, and the split of the work: NumPy only, every instruction on any machine.

An instruction is played by what its manual says, on registers as the kernel would load them; the loops around it are
the kernel's. What comes out must be the workload's C.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impls.ceilings.kernels import rate
from impls.ceilings.kernels.exp import best_exponential
from impls.ceilings.kernels.instructions import INSTRUCTIONS, MultiplyAdd, best_instruction
from impls.workloads.ceiling import Ceiling

REPEATS = 128
EVERY = [pytest.param(dtype, i, id=f"{dtype}-{i.mnemonic}-{'+'.join(sorted(i.features))}")
         for dtype, of_dtype in INSTRUCTIONS.items() for i in of_dtype]  # fmt: skip

# What a register of A and one of B, as flat lists of operands, add to a register of C: from the manuals, with the
# operands' positions written out; j is a lane of C.
PLAYED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    # C[j] += A[j] * B[j]
    "vfmadd": lambda a, b: a * b,
    "fmla": lambda a, b: a * b,
    # Pairs: C[j] += A[2j] B[2j] + A[2j+1] B[2j+1]
    "vdpbf16ps": lambda a, b: (a * b).reshape(-1, 2).sum(axis=1),
    "vpmaddwd": lambda a, b: (a * b).reshape(-1, 2).sum(axis=1),
    # Fours
    "vpdpbusd": lambda a, b: (a * b).reshape(-1, 4).sum(axis=1),
    "sdot": lambda a, b: (a * b).reshape(-1, 4).sum(axis=1),
    # 2 x 8 by 8 x 2: the second register holds the other factor's columns as rows.
    "smmla": lambda a, b: (a.reshape(2, 8) @ b.reshape(2, 8).T).ravel(),
    "bfmmla": lambda a, b: (a.reshape(2, 4) @ b.reshape(2, 4).T).ravel(),
    # AMX: row m of A by B's rows of pairs (fours) of consecutive depths, for every column.
    "tdpbf16ps": lambda a, b: np.einsum("mkp,knp->mn", a.reshape(16, 16, 2), b.reshape(16, 16, 2)).ravel(),
    "tdpfp16ps": lambda a, b: np.einsum("mkp,knp->mn", a.reshape(16, 16, 2), b.reshape(16, 16, 2)).ravel(),
    "tdpbssd": lambda a, b: np.einsum("mkp,knp->mn", a.reshape(16, 16, 4), b.reshape(16, 16, 4)).ravel(),
}
# Bytes of a register by the feature it comes with.
REGISTER_BYTES = {"avx512f": 64, "avx512bf16": 64, "avx512vnni": 64, "avx512bw": 64, "fma": 32, "avx2": 32,
                  "avxvnni": 32, "amx-tile": 1024, "neon": 16, "bf16": 16, "i8mm": 16, "dotprod": 16}  # fmt: skip


@pytest.mark.parametrize(("dtype", "instruction"), EVERY)
def test_played_instruction_gives_the_product(dtype: str, instruction: MultiplyAdd) -> None:
    case = Ceiling("rate", dtype, repeats=REPEATS)
    inputs = case.inputs(7)
    a, b = rate.packed_a(inputs["A"], instruction), rate.packed_b(inputs["B"], instruction)
    c = rate.packed_c(rate.start_of_c(inputs["B"], instruction, REPEATS), instruction).astype(np.int64)
    size = {REGISTER_BYTES[f] for f in instruction.features if f in REGISTER_BYTES}
    assert {a[0, 0, 0].nbytes, b[0, 0, 0].nbytes} == ({1024} if 1024 in size else size)
    if instruction.mnemonic == "vpdpbusd":
        b = b.view(np.int8)  # the second factor is signed, the first is not
    elif instruction.operand == "i8":
        a, b = a.view(np.int8), b.view(np.int8)
    played = PLAYED[instruction.mnemonic]
    down, across = instruction.registers
    for row_block, column_block, i, j in np.ndindex(*c.shape[:4]):
        for step in range(a.shape[1]):
            first, second = a[row_block, step, i], b[column_block, step, j]
            product = played(first.astype(np.float64), second.astype(np.float64))
            c[row_block, column_block, i, j] += REPEATS * product.astype(np.int64).reshape(c.shape[4:])
    assert c.shape[2:4] == (down, across)
    assert np.array_equal(rate.unpacked_c(c) % 2**31, case.expected(inputs)["C"].value)


@pytest.mark.parametrize(("dtype", "instruction"), EVERY)
def test_registers_in_flight_fit_the_register_file(dtype: str, instruction: MultiplyAdd) -> None:
    down, across = instruction.registers
    file = 8 if instruction.tiles else 16 if instruction.features & {"fma", "avx2", "avxvnni"} else 32
    assert down * across + down + across <= file


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 200))
def test_shares_cover_every_round_once_and_evenly(blocks: int, rounds: int, threads: int) -> None:
    split = rate.shares(blocks, rounds, threads)
    done = np.zeros(blocks, int)
    for mine in split:
        for block, part in mine:
            assert part > 0
            done[block] += part
    assert (done == rounds).all()
    work = [sum(part for _, part in mine) for mine in split]
    assert len(work) == threads and max(work) - min(work) <= 1


@pytest.mark.parametrize(
    ("dtype", "features", "mnemonic"),
    [
        ("f32", {"fma", "avx2"}, "vfmadd"),
        ("bf16", {"fma", "avx2", "avx512f"}, "vfmadd"),
        ("bf16", {"fma", "avx2", "avx512f", "avx512bf16"}, "vdpbf16ps"),
        ("bf16", {"fma", "avx2", "avx512f", "avx512bf16", "amx-tile", "amx-bf16"}, "tdpbf16ps"),
        ("f8e4m3", {"fma", "avx2", "avx512f", "avx512bf16"}, "vdpbf16ps"),
        ("f16", {"fma", "avx2", "avx512f", "avx512fp16", "amx-tile", "amx-bf16"}, "vfmadd"),
        ("i8", {"fma", "avx2"}, "vpmaddwd"),
        ("i8", {"fma", "avx2", "avxvnni"}, "vpdpbusd"),
        ("i8", {"neon", "dotprod"}, "sdot"),
        ("i8", {"neon", "dotprod", "i8mm"}, "smmla"),
        ("bf16", {"neon"}, "fmla"),
        ("bf16", {"neon", "bf16"}, "bfmmla"),
    ],
)
def test_best_instruction_of_a_host(dtype: str, features: set[str], mnemonic: str) -> None:
    chosen = best_instruction(dtype, features)
    assert chosen is not None and chosen.mnemonic == mnemonic


def test_nothing_is_claimed_where_nothing_is_known() -> None:
    assert best_instruction("f32", {"sse2"}) is None
    assert best_exponential(frozenset({"sse2"})) is None
