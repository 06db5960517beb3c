"""What all CuTe kernels begin with: pointers, tiles in shared memory, which TMA fills and mbarriers hand over.

A ring is a number of slots in shared memory with, for each slot, mbarriers: the warp that loads waits until a slot is
empty and fills it; those that multiply wait until it is full and release it.

These functions are called while the DSL traces a kernel, and their loops are unrolled by Python.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

WARP = 32
WARPGROUP = 128
DTYPES = {
    "bf16": cutlass.BFloat16,
    "f16": cutlass.Float16,
    "f8e4m3": cutlass.Float8E4M3FN,
    "f32": cutlass.Float32,
}


def pointers(kinds) -> list:
    """Pointers to global memory to trace with, on 16 bytes, one for each dtype."""
    return [cute.runtime.make_ptr(kind, 16, cute.AddressSpace.gmem, assumed_align=16) for kind in kinds]


def swizzled(room, layout: cute.ComposedLayout) -> cute.Tensor:
    """A tensor of this layout in its room of a struct in shared memory."""
    return room.get_tensor(layout.outer, swizzle=layout.inner)


def prepare(atoms, *rings) -> None:
    """Fetches descriptors and initialises mbarriers, in one warp; the CTA, or the cluster, has to meet afterwards.

    Args:
        atoms: copies by TMA.
        rings: each its number of slots, then pairs: the slots' mbarriers and the arrivals that these wait for.
    """
    for atom in atoms:
        cpasync.prefetch_descriptor(atom)
    with cute.arch.elect_one():
        for slots, *barriers in rings:
            for slot in range(slots):
                for first, arrivals in barriers:
                    cute.arch.mbarrier_init(first + slot, arrivals)
    cute.arch.mbarrier_init_fence()


def partition(atom: cute.CopyAtom, shared: cute.Tensor, tiles: cute.Tensor, rank=0, ctas: int = 1):
    """Slots in shared memory and tiles in global memory as ``atom`` copies them, numbered.

    Args:
        shared: (rows, columns, slots), or one slot.
        tiles: (rows, columns, tiles), of global memory.
        rank, ctas: this CTA's share of a tile, of as many.
    """
    return cpasync.tma_partition(
        atom, rank, cute.make_layout(ctas), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )


def expect(full: cute.Pointer, size: int) -> None:
    """The mbarrier of a slot waits for ``size`` bytes, of all copies that follow."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)


def release(empty: cute.Pointer) -> None:
    """A warp gives a slot back to the warp that loads."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(empty)
