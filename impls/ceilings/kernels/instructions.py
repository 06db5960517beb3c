"""The multiply-add instructions that a rate probe may use, and which of them is the host's best for a dtype.

Owns, for each instruction, the tile of C that one accumulator register holds, the layout of its operands, and how LLVM
IR spells it. Text only: no library is needed. The loops around an instruction belong to ``rate``.

What is counted: every instruction here takes the dtype's operands and accumulates in f32 (f64: in f64, i8: in i32), as
the workload asks. AVX512_FP16 accumulates in f16 and is therefore not used. A dtype without an instruction of its own
is widened when the operands are loaded; what is measured then is the wider dtype's rate, which is also the ceiling of a
kernel that has to widen. AVX512_VNNI and AVX_VNNI multiply unsigned by signed bytes: A is stored with 128 added, and
128 times B's column sums are taken off the result; one i8 multiply-add is counted for each, as oneDNN's users see it.
SVE and SME are not used: what a core reaches with vectors wider than NEON's 128 bits is not seen.

Sources: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2; Arm Architecture Reference Manual
for A-profile (FMLA, SDOT, SMMLA, BFMMLA); LLVM's IntrinsicsX86.td and IntrinsicsAArch64.td.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class MultiplyAdd:
    """One instruction: C (rows x columns) += A (rows x depth) @ B (depth x columns), each in one register.

    Register layouts: B is (depth / pack, columns, pack). A is (rows, depth); with one row it is broadcast to (columns,
    depth). C is (rows, columns).

    Attributes:
        mnemonic: the assembler's name, which the listing shows.
        features: LLVM's names of the instruction-set features it needs; all of them.
        operand: dtype name of the operands as the instruction takes them; ``i16`` where bytes are widened.
        accumulator: LLVM scalar type of C: ``float``, ``double`` or ``i32``.
        rows, columns, depth, pack: the tile and the layout, in elements.
        registers: (rows, columns) of C registers in flight: enough to cover the latency, few enough that they and
            their A and B registers fit the register file. Latency times throughput: 4 x 2 on AVX2 and AVX-512 cores,
            4 x 4 on NEON's widest, 52 / 16 on AMX (Intel, optimization reference manual, chapter 20).
        call: IR that computes {result} from {acc}, {a}, {b}: names of values; of AMX tiles, their numbers.
        operand_type: LLVM type of an A or B register.
        declaration: the intrinsic's declaration.
        offset: what is added to A when it is loaded, because the instruction takes it unsigned.
    """

    mnemonic: str
    features: frozenset[str]
    operand: str
    accumulator: str
    rows: int
    columns: int
    depth: int
    pack: int
    registers: tuple[int, int]
    call: str
    operand_type: str
    declaration: str
    offset: int = 0

    @property
    def register_type(self) -> str:
        """LLVM type of a C register."""
        return f"<{self.rows * self.columns} x {self.accumulator}>"

    @property
    def tiles(self) -> bool:
        """Whether its registers are AMX tiles, which IR names by number and not by value."""
        return self.features >= {"amx-tile"}


def _fma(features: set[str], scalar: str, columns: int, registers: tuple[int, int], mnemonic: str) -> MultiplyAdd:
    vector = f"<{columns} x {scalar}>"
    intrinsic = f"{vector} @llvm.fma.v{columns}{'f64' if scalar == 'double' else 'f32'}"
    return MultiplyAdd(
        mnemonic, frozenset(features), "f64" if scalar == "double" else "f32", scalar, 1, columns, 1, 1, registers,
        f"{{result}} = call {intrinsic}({vector} {{a}}, {vector} {{b}}, {vector} {{acc}})", vector,
        f"declare {intrinsic}({vector}, {vector}, {vector})",
    )  # fmt: skip


def _dot(
    mnemonic: str, feature: str, operand: str, registers: tuple[int, int], intrinsic: str, accumulator: str,
    operand_type: str, shape: tuple[int, int, int], offset: int = 0,
) -> MultiplyAdd:  # fmt: skip
    rows, columns, depth = shape
    vector = f"<{rows * columns} x {accumulator}>"
    return MultiplyAdd(
        mnemonic, frozenset({feature}), operand, accumulator, rows, columns, depth, depth, registers,
        f"{{result}} = call {vector} @{intrinsic}({vector} {{acc}}, {operand_type} {{a}}, {operand_type} {{b}})",
        operand_type, f"declare {vector} @{intrinsic}({vector}, {operand_type}, {operand_type})", offset,
    )  # fmt: skip


def _widened(feature: str, columns: int, registers: tuple[int, int], constraint: str) -> MultiplyAdd:
    # Inline assembly: as an intrinsic, the product of the same A and B would be computed once for all repeats.
    vector, words = f"<{columns} x i32>", f"<{2 * columns} x i16>"
    asm = f'asm sideeffect "vpmaddwd $2, $1, $0", "={constraint},{constraint},{constraint}"'
    return MultiplyAdd(
        "vpmaddwd", frozenset({feature}), "i16", "i32", 1, columns, 2, 2, registers,
        f"{{result}}.pairs = call {vector} {asm}({words} {{a}}, {words} {{b}})\n"
        f"{{result}} = add {vector} {{acc}}, {{result}}.pairs", words, "",
    )  # fmt: skip


def _amx(mnemonic: str, feature: str, operand: str, accumulator: str, depth: int) -> MultiplyAdd:
    return MultiplyAdd(
        mnemonic, frozenset({"amx-tile", feature}), operand, accumulator, 16, 16, depth, depth // 16, (2, 2),
        f"call void @llvm.x86.{mnemonic}(i8 {{acc}}, i8 {{a}}, i8 {{b}})", "",
        f"declare void @llvm.x86.{mnemonic}(i8 immarg, i8 immarg, i8 immarg)",
    )  # fmt: skip


_X86 = (4, 4), (4, 2)  # registers in flight of 32 (AVX-512) and of 16 (AVX2)

#: Per dtype, best first; the first whose features the host has is used.
INSTRUCTIONS: dict[str, tuple[MultiplyAdd, ...]] = {
    "f64": (
        _fma({"avx512f"}, "double", 8, _X86[0], "vfmadd"),
        _fma({"fma"}, "double", 4, _X86[1], "vfmadd"),
        _fma({"neon"}, "double", 2, (4, 4), "fmla"),
    ),
    "f32": (
        _fma({"avx512f"}, "float", 16, _X86[0], "vfmadd"),
        _fma({"fma"}, "float", 8, _X86[1], "vfmadd"),
        _fma({"neon"}, "float", 4, (4, 4), "fmla"),
    ),
    "bf16": (
        _amx("tdpbf16ps", "amx-bf16", "bf16", "float", 32),
        _dot("vdpbf16ps", "avx512bf16", "bf16", _X86[0], "llvm.x86.avx512bf16.dpbf16ps.512", "float",
             "<32 x bfloat>", (1, 16, 2)),
        _dot("bfmmla", "bf16", "bf16", (4, 4), "llvm.aarch64.neon.bfmmla", "float", "<8 x bfloat>", (2, 2, 4)),
    ),
    "f16": (_amx("tdpfp16ps", "amx-fp16", "f16", "float", 32),),
    "i8": (
        _amx("tdpbssd", "amx-int8", "i8", "i32", 64),
        _dot("vpdpbusd", "avx512vnni", "i8", _X86[0], "llvm.x86.avx512.vpdpbusd.512", "i32",
             "<16 x i32>", (1, 16, 4), offset=128),
        _dot("vpdpbusd", "avxvnni", "i8", _X86[1], "llvm.x86.avx512.vpdpbusd.256", "i32",
             "<8 x i32>", (1, 8, 4), offset=128),
        _dot("smmla", "i8mm", "i8", (4, 4), "llvm.aarch64.neon.smmla.v4i32.v16i8", "i32", "<16 x i8>", (2, 2, 8)),
        _dot("sdot", "dotprod", "i8", (4, 4), "llvm.aarch64.neon.sdot.v4i32.v16i8", "i32", "<16 x i8>", (1, 4, 4)),
        _widened("avx512bw", 16, _X86[0], "v"),
        _widened("avx2", 8, _X86[1], "x"),
    ),
}  # fmt: skip


#: Into which dtypes one without an instruction of its own is widened, exactly, best first.
WIDENED = {"f8e4m3": ("bf16", "f32"), "bf16": ("f32",), "f16": ("f32",)}


def best_instruction(dtype: str, features: Iterable[str]) -> MultiplyAdd | None:
    """The host's best instruction for a dtype: its own, else that of a wider one; None if there is none.

    Args:
        dtype: a dtype of the rate probe.
        features: LLVM's names of the host's features.
    """
    present = frozenset(features)
    candidates = (i for name in (dtype, *WIDENED.get(dtype, ())) for i in INSTRUCTIONS.get(name, ()))
    return next((i for i in candidates if i.features <= present), None)
