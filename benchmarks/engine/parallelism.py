"""The CPUs and the thread count that every worker gets: the same for all stacks, set in this one place.

Owns the choice of CPUs and the environment variables that the stacks' thread pools read. IREE reads none: its stack
takes ``device.threads`` and says so in its own flags.
"""

from __future__ import annotations

import os
from pathlib import Path

_SYSFS = Path("/sys/devices/system/cpu")


def choose_cpus(count: int) -> tuple[int, ...]:
    """``count`` of the CPUs this process may use: one per core first, their hardware siblings after that.

    Raises:
        ValueError: there are not so many.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(allowed):
        raise ValueError(f"{count} threads were asked for, and this process may use {len(allowed)} CPUs.")
    ranked = sorted(allowed, key=lambda cpu: (_place_in_core(cpu, allowed), cpu))
    return tuple(sorted(ranked[:count]))


def _place_in_core(cpu: int, allowed: list[int]) -> int:
    """0 for the first allowed hardware thread of a core, 1 for the second ..."""
    try:
        text = (_SYSFS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return 0
    siblings: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        siblings |= set(range(int(first), int(last or first) + 1))
    return sorted(siblings & set(allowed)).index(cpu)


def environment(count: int) -> dict[str, str]:
    """Variables that give every stack ``count`` threads which sleep, not spin, when they have nothing to do.

    A thread that spins after its call ends would take time from the next worker's calls.
    """
    n = str(count)
    return {
        # OpenMP 5.2, chapter 21; GNU's and LLVM's runtimes read them (PyTorch, oneDNN).
        "OMP_NUM_THREADS": n,
        "OMP_DYNAMIC": "FALSE",
        "OMP_PROC_BIND": "FALSE",
        "OMP_WAIT_POLICY": "PASSIVE",
        # LLVM's and Intel's OpenMP: milliseconds that a thread spins before it sleeps.
        "KMP_BLOCKTIME": "0",
        "MKL_NUM_THREADS": n,
        "MKL_DYNAMIC": "FALSE",
        "OPENBLAS_NUM_THREADS": n,
        "BLIS_NUM_THREADS": n,
        "NUMEXPR_NUM_THREADS": n,
        # XLA: the size of the CPU client's pool (xla/pjrt/utils.cc, DefaultThreadPoolSize).
        "NPROC": n,
        # TVM: src/runtime/threading_backend.cc and thread_pool.cc. Unset, it would pin its threads to CPUs 0, 1, ...
        # whatever the affinity, and spin 300000 times before it sleeps.
        "TVM_NUM_THREADS": n,
        "TVM_BIND_THREADS": "0",
        "TVM_THREAD_POOL_SPIN_COUNT": "0",
    }
