"""Independent pieces of inputs and references, on all cores of this process.

NumPy lets go of the interpreter in its loops, so threads suffice. They replace the threads of NumPy's BLAS, which spin
while they wait and are slow where cores are shared: a process that makes references is best started with
OPENBLAS_NUM_THREADS=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """``work`` of every item, in the items' order."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(len(items), cores)
    if threads <= 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads) as executor:
        yield from executor.map(work, items)
