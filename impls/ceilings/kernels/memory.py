"""The memory probes' kernels: IR that sums or copies a thread's slice, over and over.

Owns the loops. Vectors are as wide as the host's; a turn of the loop moves a kilobyte, so that the loop itself costs
nothing, and its end, which a core may mispredict once per repeat, little even in a slice of a first-level cache. Text
only: no library is needed.
"""

from __future__ import annotations

#: Bytes that a turn of the loop moves; slices begin at, and are made of, multiples of it.
BLOCK = 1024
# Vectors that are loaded before they are stored (copy), and accumulators in flight (read).
_TOGETHER = 8
#: Words (int64) of a thread's arguments: addresses of source and destination (read: of the sum), bytes, repeats.
WORDS = 4


def vector_bytes(features: frozenset[str]) -> int:
    """Width of the host's vector registers by LLVM's names of its features."""
    return 64 if "avx512f" in features else 32 if "avx2" in features else 16


def _loops(name: str, before: list[str], carried: list[str], body: list[str], after: list[str]) -> str:
    """A function over (slice, repeats): ``carried`` are phis of the inner loop, ``body`` one turn of it."""
    return "\n".join(
        [
            f"define void @{name}(ptr %arguments) #0 {{",
            "entry:",
            *[f"  %slot.{i} = getelementptr i64, ptr %arguments, i64 {i}" for i in range(WORDS)],
            "  %source = load ptr, ptr %slot.0",
            "  %destination = load ptr, ptr %slot.1",
            "  %bytes = load i64, ptr %slot.2",
            "  %repeats = load i64, ptr %slot.3",
            "  %none = icmp eq i64 %bytes, 0",
            "  br i1 %none, label %leave, label %repeat",
            "repeat:",
            "  %r = phi i64 [ 0, %entry ], [ %r.next, %through ]",
            *before,
            "  br label %turn",
            "turn:",
            "  %at = phi i64 [ 0, %repeat ], [ %at.next, %turn ]",
            *carried,
            *body,
            f"  %at.next = add i64 %at, {BLOCK}",
            "  %more = icmp ult i64 %at.next, %bytes",
            "  br i1 %more, label %turn, label %through",
            "through:",
            # Stands between the repeats: what memory holds is unknown again, so none can be left out or merged.
            '  call void asm sideeffect "", "~{memory}"()',
            "  %r.next = add i64 %r, 1",
            "  %again = icmp ult i64 %r.next, %repeats",
            "  br i1 %again, label %repeat, label %finish",
            "finish:",
            *after,
            "  br label %leave",
            "leave:",
            "  ret void",
            "}",
            'attributes #0 = { "prefer-vector-width"="512" "min-legal-vector-width"="512" }',
        ]
    )


def read_ir(width: int) -> str:
    """IR of ``@read``: the sum, modulo 2^32, of the i32 of a slice, over all repeats, added to the destination.

    Args:
        width: bytes of a vector.
    """
    lanes = width // 4
    vector, each = f"<{lanes} x i32>", range(_TOGETHER)
    vectors = BLOCK // width
    body = []
    for v in range(vectors):
        body += [
            f"  %at.{v} = add i64 %at, {v * width}",
            f"  %from.{v} = getelementptr i8, ptr %source, i64 %at.{v}",
            f"  %x.{v} = load {vector}, ptr %from.{v}, align 4",
            f"  %s.{v + _TOGETHER} = add {vector} %s.{v}, %x.{v}",
        ]
    total, after = f"%s.{vectors}", []
    for v in each[1:]:
        after.append(f"  %total.{v} = add {vector} {total}, %s.{vectors + v}")
        total = f"%total.{v}"
    return f"declare i32 @llvm.vector.reduce.add.v{lanes}i32({vector})\n" + _loops(
        "read",
        [f"  %c.{v} = phi {vector} [ zeroinitializer, %entry ], [ %s.{vectors + v}, %through ]" for v in each],
        [f"  %s.{v} = phi {vector} [ %c.{v}, %repeat ], [ %s.{vectors + v}, %turn ]" for v in each],
        body,
        [
            *after,
            f"  %sum = call i32 @llvm.vector.reduce.add.v{lanes}i32({vector} {total})",
            "  atomicrmw add ptr %destination, i32 %sum monotonic",
        ],
    )


def copy_ir(name: str, width: int, *, nontemporal: bool = False) -> str:
    """IR of a function that copies a slice to the destination (aligned to the vectors), once per repeat.

    Args:
        name: the function's name.
        width: bytes of a vector.
        nontemporal: stores go past the caches (x86: vmovntps, aarch64: stnp): a line is not read before it is written.
    """
    vector = f"<{width // 4} x i32>"
    hint = ", !nontemporal !0" if nontemporal else ""
    body = []
    for first in range(0, BLOCK // width, _TOGETHER):
        some = range(first, first + _TOGETHER)
        for v in some:
            body += [
                f"  %at.{v} = add i64 %at, {v * width}",
                f"  %from.{v} = getelementptr i8, ptr %source, i64 %at.{v}",
                f"  %to.{v} = getelementptr i8, ptr %destination, i64 %at.{v}",
                f"  %x.{v} = load {vector}, ptr %from.{v}, align 4",
            ]
        body += [f"  store {vector} %x.{v}, ptr %to.{v}, align {width}{hint}" for v in some]
    # Non-temporal stores are ordered by a full fence only.
    after = ["  fence seq_cst"] if nontemporal else []
    return _loops(name, [], [], body, after) + ("\n!0 = !{i32 1}" if nontemporal else "")
