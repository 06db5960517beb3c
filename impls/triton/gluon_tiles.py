"""What the Gluon kernels are tiled by: what can be chosen, what fits, what is chosen.

Owns the parameters, the space that tuning searches and the rule where nothing near was tuned. It imports no Triton.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from impls.contract import Device
from impls.triton import choices
from impls.workloads.attention import Attention
from impls.workloads.dtypes import dtype
from impls.workloads.gemm import Gemm

_NAME = "triton.gluon"
# Rows of a tile of C and queries of a tile: 64, which is wgmma's M, for each of two consumers.
ROWS = 128
# Shared memory that a CTA of sm_90 may have (CUDA C++ programming guide, table of compute capabilities), less what
# barriers take.
_SHARED_BYTES = 227 * 1024 - 1024
# L2 that the keys and values of heads walked together may take: with 8 MiB of an H200's 50 two heads of 8192 keys at
# head size 128 were ahead of eight by up to 1.6 %.
_SECTION_BYTES = 8 * 2**20
# Slots that the rings of K and of V can have.
_STAGES = (2, 3)


@dataclass(frozen=True)
class Tiling:
    """What a GEMM is tiled by.

    Attributes:
        bn: columns of a tile of C; it has ``ROWS`` rows.
        bk: length along K of a stage.
        stages: slots of the ring.
        group: tile rows that are walked together.
        lead: steps that the first consumer is ahead of the second: none, or two and more.
    """

    bn: int
    bk: int
    stages: int
    group: int
    lead: int

    def config(self) -> dict[str, Any]:
        """For the record and the tuned file."""
        return asdict(self)


@dataclass(frozen=True)
class Blocking:
    """What an attention is blocked by.

    Attributes:
        block: keys of a block.
        stages: slots of the rings of K and of V.
        section: heads whose tiles are walked together.
    """

    block: int
    stages: int
    section: int

    def config(self) -> dict[str, Any]:
        """For the record and the tuned file."""
        return asdict(self)


def choose_tiling(case: Gemm, device: Device) -> tuple[Tiling, str]:
    """The tiling of a case, and where it comes from: ``tuned for <case id> in <seconds> s`` or ``rule``."""
    found = choices.nearest(_NAME, case, device.name, _alike_gemm, choices.gemm_sizes, choices.FAR)
    tiling, origin = (Tiling(**found.choice), found.origin) if found else (_gemm_rule(case), "rule")
    while gemm_shared_bytes(tiling, case) > _SHARED_BYTES:  # tuned for a neighbour whose C is in 16 bits
        tiling = replace(tiling, stages=tiling.stages - 1)
    return replace(tiling, lead=min(tiling.lead, tiling.stages - 1)), origin


def choose_blocking(case: Attention, device: Device) -> tuple[Blocking, str]:
    """The blocking of a case, and where it comes from."""
    found = choices.nearest(_NAME, case, device.name, _alike_attention, _attention_sizes)
    if not found:
        return _attention_rule(case), "rule"
    blocking = Blocking(**found.choice)
    if found.case_id != case.id:
        # Which heads share L2 depends on their keys, of which a neighbour has another number.
        blocking = replace(blocking, section=_section(case))
    return blocking, found.origin


def gemm_space(case: Gemm) -> list[Tiling]:
    """What tuning tries: both widths, rings as deep as they can be, and all ways to walk and to lead."""
    found = []
    for bn in (128, 256):
        depth = max(
            stages for stages in range(2, 9) if gemm_shared_bytes(_tiling(case, bn, stages), case) <= _SHARED_BYTES
        )
        for stages, group, lead in product((depth, depth - 1), (4, 8, 16, 32), (0, 2, 3, 5)):
            if lead < stages:
                found.append(replace(_tiling(case, bn, stages), group=group, lead=lead))
    return found


def attention_space(case: Attention) -> list[Blocking]:
    """What tuning tries: rings that fit, and more or fewer heads at a time."""
    near = _section(case)
    sections = sorted({min(max(1, near * n // 4), case.batch * case.hq) for n in (1, 2, 4, 8)})
    return [Blocking(_block(case), stages, section) for stages, section in product(_stages(case), sections)]


def gemm_shared_bytes(tiling: Tiling, case: Gemm) -> int:
    """The ring's bytes, and those of the buffers through which C leaves."""
    ring = tiling.stages * (ROWS + tiling.bn) * tiling.bk * dtype(case.dtype).bytes
    return ring + 64 * tiling.bn * dtype(case.out).bytes


def attention_shared_bytes(block: int, stages: int, case: Attention) -> int:
    """Bytes of Q's tile, of the rings of K and V, and of O's tile, which has none of its own at head size 256."""
    d = padded_head(case)
    return 2 * d * (ROWS * (2 if d < 256 else 1) + 2 * stages * block)


def padded_head(case: Attention) -> int:
    """The head size of a tile: a power of two, and 64 at least."""
    return max(64, 1 << (case.d - 1).bit_length())


def _tiling(case: Gemm, bn: int, stages: int) -> Tiling:
    return Tiling(bn, 128 // dtype(case.dtype).bytes, stages, 16, min(3, stages - 1))


def _gemm_rule(case: Gemm) -> Tiling:
    """As wide as it can be while there are tiles for every second SM.

    Groups of 16 tile rows, and a first consumer that leads by nearly the whole ring, were the best of 8 to 32 and of 0
    to 3 on the H200 in burst: 0.998 of cuBLAS' best at 4096^3 and 0.978 at 8192^3 bf16, up to 1.5 % ahead of the rest.
    """
    wide = _wide(case)
    stages = (4 if wide else 6) - (case.out == "f32")  # staging of 32-bit outputs takes twice the room
    return _tiling(case, 256 if wide else 128, stages)


def _wide(case: Gemm) -> bool:
    """Whether there are tiles of 256 columns for every second SM."""
    return case.n > 128 and case.batch * -(-case.m // ROWS) * -(-case.n // 256) >= 66


def _attention_rule(case: Attention) -> Blocking:
    """The deepest rings: three slots were ahead of two at head size 64, where three fit."""
    return Blocking(_block(case), max(_stages(case)), _section(case))


def _stages(case: Attention) -> list[int]:
    """Slots that fit."""
    return [n for n in _STAGES if attention_shared_bytes(_block(case), n, case) <= _SHARED_BYTES]


def _block(case: Attention) -> int:
    """As many keys as registers and shared memory hold beside the head."""
    return 64 if case.d > 128 else 128


def _section(case: Attention) -> int:
    """Heads whose keys and values take ``_SECTION_BYTES``."""
    return max(1, min(_SECTION_BYTES * case.group // (4 * case.sk * case.d), case.batch * case.hq))


def _alike_gemm(case: Gemm) -> tuple[Any, ...]:
    return *choices.gemm_kind(case), _wide(case)


def _alike_attention(case: Attention) -> tuple[Any, ...]:
    return padded_head(case), case.mask != "full"


def _attention_sizes(case: Attention) -> tuple[float, ...]:
    return case.batch * case.hq, case.group, case.sq, case.sk
