"""Which CPUs and how many threads every worker gets."""

from __future__ import annotations

import os

import pytest

from benchmarks.engine import parallelism


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Make this process see a machine: CPU -> its siblings as the kernel writes them; None where it says nothing."""

    def see(siblings: dict[int, str | None]) -> None:
        for cpu, text in siblings.items():
            if text is not None:
                (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
                (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(text + "\n")
        monkeypatch.setattr(parallelism, "_SYSFS", tmp_path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(siblings))

    return see


@pytest.mark.parametrize(
    ("siblings", "count", "chosen"),
    [
        # Siblings far apart (Intel servers) and next to each other (many desktops).
        ({0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}, 2, (0, 1)),
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, 2, (0, 2)),
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, 3, (0, 1, 2)),
        ({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, 4, (0, 1, 2, 3)),
        # CPU 0 is not ours: its sibling is the first of that core.
        ({1: "0-1", 2: "2-3", 3: "2-3"}, 2, (1, 2)),
        # A virtual machine that tells nothing.
        ({3: None, 7: None}, 1, (3,)),
    ],
)
def test_one_cpu_per_core_comes_first(machine, siblings, count, chosen):
    machine(siblings)
    assert parallelism.choose_cpus(count) == chosen


@pytest.mark.parametrize("count", [0, -1, 3])
def test_cpus_that_are_not_there_are_refused(machine, count):
    machine({0: "0", 1: "1"})
    with pytest.raises(ValueError, match="this process may use 2 CPUs"):
        parallelism.choose_cpus(count)


def test_every_pool_gets_the_same_count_and_none_spins():
    environ = parallelism.environment(6)
    counts = {name: value for name, value in environ.items() if name.endswith("_NUM_THREADS") or name == "NPROC"}
    assert set(counts.values()) == {"6"}
    assert {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS", "NPROC"} <= set(counts)
    assert environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environ["KMP_BLOCKTIME"] == environ["TVM_BIND_THREADS"] == environ["TVM_THREAD_POOL_SPIN_COUNT"] == "0"
