"""The rate probe's kernel: IR of its loops, and the operands laid out as registers.

Owns the order of the work. The probe asks for ``repeats`` products of the same 64 x 64 matrices. Here the repeats are
the innermost loop: a block of A and B registers is loaded once and multiplied 64 times into the C registers, so that
the loop that is timed touches registers only. 64 repeats are what an f32 accumulator holds exactly; then the block of C
is converted and added to a total. Text and NumPy only: no library is needed.

Vocabulary: a *block* is what the C registers hold together, ``registers`` times the instruction's tile; a *round* is 64
repeats of a block; a *share* is a thread's rounds of one block.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from impls.ceilings.kernels.instructions import MultiplyAdd
from impls.workloads.ceiling import TILE

#: Repeats that an f32 accumulator holds exactly, see the workload.
ROUND = 64
_UNROLL = 8
#: Words (int64) of a share: addresses of A, B, the block of C and its lock; rounds.
SHARE_WORDS = 5

_OPERANDS = {
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "i16": np.dtype(np.int16),
    "i8": np.dtype(np.uint8),  # signed or, with an offset, unsigned: the bits are what counts
}


def block_shape(instruction: MultiplyAdd) -> tuple[int, int]:
    """Rows and columns of C in one block."""
    return instruction.registers[0] * instruction.rows, instruction.registers[1] * instruction.columns


def packed_a(a: np.ndarray, instruction: MultiplyAdd) -> np.ndarray:
    """A (64, 64) as (blocks, depth steps, registers, elements of a register)."""
    rows, count = instruction.rows, instruction.registers[0]
    values = a.astype(np.int16) + instruction.offset if instruction.offset else a
    values = _stored(values, instruction)
    steps = TILE // instruction.depth
    packed = values.reshape(-1, count, rows, steps, instruction.depth).transpose(0, 3, 1, 2, 4)
    if rows == 1:
        packed = np.broadcast_to(packed, (*packed.shape[:3], instruction.columns, instruction.depth))
    return np.ascontiguousarray(packed).reshape(TILE // (count * rows), steps, count, -1)


def packed_b(b: np.ndarray, instruction: MultiplyAdd) -> np.ndarray:
    """B (64, 64) as (blocks, depth steps, registers, elements of a register)."""
    columns, count, pack = instruction.columns, instruction.registers[1], instruction.pack
    steps = TILE // instruction.depth
    values = _stored(b, instruction).reshape(steps, instruction.depth // pack, pack, -1, count, columns)
    return np.ascontiguousarray(values.transpose(3, 0, 4, 1, 5, 2)).reshape(TILE // (count * columns), steps, count, -1)


def packed_c(c: np.ndarray, instruction: MultiplyAdd) -> np.ndarray:
    """C (64, 64), i32, as (row blocks, column blocks, register rows, register columns, rows, columns)."""
    (down, across), rows, columns = instruction.registers, instruction.rows, instruction.columns
    return np.ascontiguousarray(
        c.reshape(-1, down, rows, TILE // (across * columns), across, columns).transpose(0, 3, 1, 4, 2, 5)
    )


def unpacked_c(packed: np.ndarray) -> np.ndarray:
    """What ``packed_c`` packed."""
    return packed.transpose(0, 2, 4, 1, 3, 5).reshape(TILE, TILE)


def start_of_c(b: np.ndarray, instruction: MultiplyAdd, repeats: int) -> np.ndarray:
    """C before the first repeat: zero, less what an offset of A adds in ``repeats`` repeats, modulo 2^32; (64, 64)."""
    excess = b.astype(np.int64).sum(axis=0) * instruction.offset * repeats
    return np.broadcast_to(-excess, (TILE, TILE)).astype(np.uint32).view(np.int32)


def _stored(values: np.ndarray, instruction: MultiplyAdd) -> np.ndarray:
    stored = _OPERANDS[instruction.operand]
    if stored == np.uint8:
        return values.astype(np.int16).astype(np.uint8)
    return values.astype(stored)


def rate_ir(instruction: MultiplyAdd) -> str:
    """IR of ``@rate``: a thread's shares, one after the other.

    Its argument points to two words: the address of the first share and their number. A share's total is added to C
    under the block's lock, a vector at a time: two threads may share a block.
    """
    block = block_shape(instruction)[0] * block_shape(instruction)[1]
    tile = _amx_block(instruction) if instruction.tiles else _vector_block(instruction)
    before, after = (_AMX_CONFIGURE, "  call void @llvm.x86.tilerelease()") if instruction.tiles else ("", "")
    return f"""{instruction.declaration}
{tile}
define void @rate(ptr %arguments) #0 {{
entry:
  %total = alloca [{block} x i32], align 64
  %share.first = load ptr, ptr %arguments
  %count.slot = getelementptr i64, ptr %arguments, i64 1
  %count = load i64, ptr %count.slot
{before}
  br label %next
next:
  %n = phi i64 [ 0, %entry ], [ %n.next, %unlock ]
  %over = icmp eq i64 %n, %count
  br i1 %over, label %leave, label %share
share:
  %share.words = mul i64 %n, {SHARE_WORDS}
  %a.slot = getelementptr i64, ptr %share.first, i64 %share.words
  %b.slot = getelementptr i64, ptr %a.slot, i64 1
  %c.slot = getelementptr i64, ptr %a.slot, i64 2
  %lock.slot = getelementptr i64, ptr %a.slot, i64 3
  %rounds.slot = getelementptr i64, ptr %a.slot, i64 4
  %a = load ptr, ptr %a.slot
  %b = load ptr, ptr %b.slot
  %c = load ptr, ptr %c.slot
  %lock = load ptr, ptr %lock.slot
  %rounds = load i64, ptr %rounds.slot
  call void @llvm.memset.p0.i64(ptr align 64 %total, i8 0, i64 {4 * block}, i1 false)
  call void @block(ptr %a, ptr %b, ptr %total, i64 %rounds)
  br label %acquire
acquire:
  %held = atomicrmw xchg ptr %lock, i32 1 acquire
  %taken = icmp ne i32 %held, 0
  br i1 %taken, label %acquire, label %add
add:
  %i = phi i64 [ 0, %acquire ], [ %i.next, %add ]
  %from = getelementptr i32, ptr %total, i64 %i
  %to = getelementptr i32, ptr %c, i64 %i
  %part = load <16 x i32>, ptr %from, align 4
  %old = load <16 x i32>, ptr %to, align 4
  %new = add <16 x i32> %part, %old
  store <16 x i32> %new, ptr %to, align 4
  %i.next = add i64 %i, 16
  %more = icmp ult i64 %i.next, {block}
  br i1 %more, label %add, label %unlock
unlock:
  store atomic i32 0, ptr %lock release, align 4
  %n.next = add i64 %n, 1
  br label %next
leave:
{after}
  ret void
}}
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
attributes #0 = {{ "prefer-vector-width"="512" "min-legal-vector-width"="512" }}
"""


def _vector_block(instruction: MultiplyAdd) -> str:
    """IR of ``@block``: ``rounds`` rounds of one block, C in vector registers, added to ``%total``."""
    down, across = instruction.registers
    steps = TILE // instruction.depth
    c, ab, lanes = instruction.register_type, instruction.operand_type, instruction.rows * instruction.columns
    register = _OPERANDS[instruction.operand].itemsize * instruction.columns * instruction.depth  # bytes
    cells = [(i, j) for i in range(down) for j in range(across)]

    lines = [
        "define internal void @block(ptr %a, ptr %b, ptr %total, i64 %rounds) #0 {",
        "entry:",
        "  br label %round",
        "round:",
        "  %n = phi i64 [ 0, %entry ], [ %n.next, %flush ]",
        "  br label %step",
        "step:",
        "  %k = phi i64 [ 0, %round ], [ %k.next, %stepped ]",
    ]
    zero = "zeroinitializer"
    lines += [f"  %s.{i}.{j} = phi {c} [ {zero}, %round ], [ %r{_UNROLL}.{i}.{j}, %stepped ]" for i, j in cells]
    for operand, count in (("a", down), ("b", across)):
        lines.append(f"  %{operand}.at = mul i64 %k, {count * register}")
        for i in range(count):
            lines.append(f"  %{operand}.{i}.offset = add i64 %{operand}.at, {i * register}")
            lines.append(f"  %{operand}.{i}.ptr = getelementptr i8, ptr %{operand}, i64 %{operand}.{i}.offset")
            lines.append(f"  %{operand}.{i} = load {ab}, ptr %{operand}.{i}.ptr, align 16")
    lines += ["  br label %repeat", "repeat:", "  %r = phi i64 [ 0, %step ], [ %r.next, %repeat ]"]
    lines += [f"  %r0.{i}.{j} = phi {c} [ %s.{i}.{j}, %step ], [ %r{_UNROLL}.{i}.{j}, %repeat ]" for i, j in cells]
    for u in range(_UNROLL):
        for i, j in cells:
            text = instruction.call.format(result=f"%r{u + 1}.{i}.{j}", acc=f"%r{u}.{i}.{j}", a=f"%a.{i}", b=f"%b.{j}")
            lines += [f"  {line}" for line in text.splitlines()]
    lines += [
        f"  %r.next = add i64 %r, {_UNROLL}",
        f"  %again = icmp ult i64 %r.next, {ROUND}",
        "  br i1 %again, label %repeat, label %stepped",
        "stepped:",
        "  %k.next = add i64 %k, 1",
        f"  %deeper = icmp ult i64 %k.next, {steps}",
        "  br i1 %deeper, label %step, label %flush",
        "flush:",
    ]
    for number, (i, j) in enumerate(cells):
        name = f"r{_UNROLL}.{i}.{j}"
        whole = f"%{name}"
        if instruction.accumulator != "i32":
            lines.append(f"  %w.{number} = fptosi {c} {whole} to <{lanes} x i32>")
            whole = f"%w.{number}"
        lines += [
            f"  %t.{number}.ptr = getelementptr i32, ptr %total, i64 {number * lanes}",
            f"  %t.{number} = load <{lanes} x i32>, ptr %t.{number}.ptr, align 4",
            f"  %u.{number} = add <{lanes} x i32> %t.{number}, {whole}",
            f"  store <{lanes} x i32> %u.{number}, ptr %t.{number}.ptr, align 4",
        ]
    lines += [
        "  %n.next = add i64 %n, 1",
        "  %more = icmp ult i64 %n.next, %rounds",
        "  br i1 %more, label %round, label %leave",
        "leave:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


# Tile numbers: C in 0 ... 3, A in 4 and 5, B in 6 and 7. Every tile is 16 rows of 64 bytes.
_TILE_BYTES = 1024
# LDTILECFG's operand: palette 1; bytes per row of each tile as 16-bit words from byte 16; rows as bytes from byte 48.
_AMX_CONFIGURE = "  call void @llvm.x86.ldtilecfg(ptr @configuration)"
_AMX_DECLARATIONS = (
    "@configuration = internal constant <{ [16 x i8], [16 x i16], [16 x i8] }> "
    f"<{{ [16 x i8] [{', '.join(['i8 1'] + ['i8 0'] * 15)}], "
    f"[16 x i16] [{', '.join(['i16 64'] * 8 + ['i16 0'] * 8)}], "
    f"[16 x i8] [{', '.join(['i8 16'] * 8 + ['i8 0'] * 8)}] }}>, align 64\n"
    "declare void @llvm.x86.ldtilecfg(ptr)\n"
    "declare void @llvm.x86.tilerelease()\n"
    "declare void @llvm.x86.tilezero(i8 immarg)\n"
    "declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)\n"
    "declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)"
)


def _amx_block(instruction: MultiplyAdd) -> str:
    """IR of ``@block`` with C in AMX tiles, which are named by number: ``rounds`` rounds, added to ``%total``."""
    steps = TILE // instruction.depth
    products = [
        "  " + instruction.call.format(result="", acc=2 * i + j, a=4 + i, b=6 + j) for i in (0, 1) for j in (0, 1)
    ]
    load = "  call void @llvm.x86.tileloadd64(i8 {tile}, ptr %{name}.{i}, i64 64)"
    lines = [
        _AMX_DECLARATIONS,
        "define internal void @block(ptr %a, ptr %b, ptr %total, i64 %rounds) #0 {",
        "entry:",
        f"  %stored = alloca [{4 * _TILE_BYTES} x i8], align 64",
        "  br label %round",
        "round:",
        "  %n = phi i64 [ 0, %entry ], [ %n.next, %flushed ]",
        *[f"  call void @llvm.x86.tilezero(i8 {tile})" for tile in range(4)],
        "  br label %step",
        "step:",
        "  %k = phi i64 [ 0, %round ], [ %k.next, %stepped ]",
        f"  %at = mul i64 %k, {2 * _TILE_BYTES}",
        f"  %at.1 = add i64 %at, {_TILE_BYTES}",
    ]
    for name, tile in (("a", 4), ("b", 6)):
        lines += [
            f"  %{name}.0 = getelementptr i8, ptr %{name}, i64 %at",
            f"  %{name}.1 = getelementptr i8, ptr %{name}, i64 %at.1",
            load.format(tile=tile, name=name, i=0),
            load.format(tile=tile + 1, name=name, i=1),
        ]
    lines += [
        "  br label %repeat",
        "repeat:",
        "  %r = phi i64 [ 0, %step ], [ %r.next, %repeat ]",
        *(products * _UNROLL),
        f"  %r.next = add i64 %r, {_UNROLL}",
        f"  %again = icmp ult i64 %r.next, {ROUND}",
        "  br i1 %again, label %repeat, label %stepped",
        "stepped:",
        "  %k.next = add i64 %k, 1",
        f"  %deeper = icmp ult i64 %k.next, {steps}",
        "  br i1 %deeper, label %step, label %flush",
        "flush:",
    ]
    for tile in range(4):
        lines += [
            f"  %stored.{tile} = getelementptr i8, ptr %stored, i64 {tile * _TILE_BYTES}",
            f"  call void @llvm.x86.tilestored64(i8 {tile}, ptr %stored.{tile}, i64 64)",
        ]
    convert = instruction.accumulator != "i32"
    lines += [
        "  br label %add",
        "add:",
        "  %i = phi i64 [ 0, %flush ], [ %i.next, %add ]",
        "  %from = getelementptr i32, ptr %stored, i64 %i",
        "  %to = getelementptr i32, ptr %total, i64 %i",
        f"  %part = load <16 x {instruction.accumulator}>, ptr %from, align 64",
        "  %whole = fptosi <16 x float> %part to <16 x i32>" if convert else "",
        "  %old = load <16 x i32>, ptr %to, align 4",
        f"  %new = add <16 x i32> %old, {'%whole' if convert else '%part'}",
        "  store <16 x i32> %new, ptr %to, align 4",
        "  %i.next = add i64 %i, 16",
        f"  %adding = icmp ult i64 %i.next, {4 * _TILE_BYTES // 4}",
        "  br i1 %adding, label %add, label %flushed",
        "flushed:",
        "  %n.next = add i64 %n, 1",
        "  %more = icmp ult i64 %n.next, %rounds",
        "  br i1 %more, label %round, label %leave",
        "leave:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


def shares(blocks: int, rounds: int, threads: int) -> list[list[tuple[int, int]]]:
    """The rounds of every block, split evenly: per thread a list of (block, rounds), rounds > 0.

    Threads get contiguous stretches of the rounds of block 0, then block 1, ...; they differ by one round at most.
    """
    total = blocks * rounds
    split: list[list[tuple[int, int]]] = []
    for thread in range(threads):
        low, high = total * thread // threads, total * (thread + 1) // threads
        mine = []
        while low < high:
            block = low // rounds
            end = min(high, (block + 1) * rounds)
            mine.append((block, end - low))
            low = end
        split.append(mine)
    return split
