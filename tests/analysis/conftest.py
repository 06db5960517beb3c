"""Synthetic records, in the schema of docs/architecture.md, with planted times."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest


class Records:
    """Builds the lines of runs. Times are given per round, in microseconds."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def run(self, run: str = "r1", machine: str = "box", kind: str = "cpu", **device: Any) -> None:
        self._add(
            "run",
            run,
            started="2025-01-01T00:00:00+00:00",
            seed=1,
            machine={"name": machine, "cores": 2},
            device={"kind": kind, "name": f"{machine}'s device", "arch": "x86_64", "threads": 2, **device},
            harness={"numpy": "2"},
            commit="c0ffee",
            dirty=False,
            plan={},
        )
        self._add("stack", run, stack="blas", versions={"torch": "2.13.0"}, lock="abc", python="3.11.9")

    def result(
        self,
        case: str,
        impl: str,
        times_us: Iterable[float] = (),
        *,
        run: str = "r1",
        samples: int = 3,
        **fields: Any,
    ) -> None:
        # An odd number of samples around the time: their median is the time itself.
        spread = [1 + 0.1 * (s - samples // 2) for s in range(samples)]
        rounds = [
            {"round": i, "order": 0, "t0": float(i), "samples_us": [t * s for s in spread]}
            for i, t in enumerate(times_us)
        ]
        status = fields.pop("status", "ok")
        self._add(
            "result",
            run,
            **{
                "case": case,
                "impl": impl,
                "replica": 0,
                "regime": "warm",
                "status": status,
                "reason": None,
                "method": "perf_counter_ns" if rounds else None,
                "rounds": rounds,
                "prepare_s": 0.5,
                "first_call_s": 0.1,
                "peak_memory_bytes": 1 << 20,
                "errors": {"C": {"max_abs": 1e-6, "worst": 0.25}} if status == "ok" else {},
                "traffic_bytes": None,
                "workspace_bytes": 0,
                "config": {},
                "flags": [],
                "seed": 1,
                "complete": True,
                "when": "2025-01-01T00:00:01+00:00",
            }
            | fields,
        )

    def paired(
        self,
        case: str,
        ratios: Mapping[str, float],
        rounds: int = 10,
        noise: float = 0.001,
        seed: int = 0,
        **fields: Any,
    ) -> None:
        """A baseline (blas.default, two replicas) of about 1 ms and implementations with planted time ratios."""
        rng = np.random.default_rng(seed)
        drift = 1000.0 * np.exp(rng.normal(0, 0.05, rounds))  # Common to all: paired ratios must not see it.

        def scatter() -> np.ndarray:
            return np.exp(rng.normal(0, noise, rounds))

        for replica in (0, 1):
            self.result(case, "blas.default", drift * scatter(), replica=replica, **fields)
        for impl, ratio in ratios.items():
            self.result(case, impl, ratio * drift * scatter(), **fields)

    def ceilings(self, run: str = "r1", **fields: Any) -> None:
        """Round numbers: 100 GFLOP/s f32, 400 bf16, 1e9 exp/s, 100 GB/s up to 1 MiB, 10 GB/s from 64 MiB on."""
        for case, seconds in {
            "ceiling:rate:f32": 2 * 64**3 * 16384 / 100e9,
            "ceiling:rate:bf16": 2 * 64**3 * 16384 / 400e9,
            "ceiling:exp:f32": 4096 * 16384 / 1e9,
            "ceiling:read:64KiB": (1 << 30) / 100e9,
            "ceiling:read:1MiB": (1 << 30) / 100e9,
            "ceiling:read:64MiB": (1 << 30) / 10e9,
            "ceiling:launch": 1e-6,
        }.items():
            self.result(case, "ceilings.avx512", np.array([1.1, 1.0, 1.2]) * seconds * 1e6, run=run, **fields)

    def profile(
        self, case: str, impl: str, *, run: str = "r1", read: int = 0, written: int = 0, back: int = 0, **fields: Any
    ) -> None:
        """Counted traffic of one call, in bytes: DRAM reads, DRAM writes, and dirty lines written after it."""
        counters = {
            "dram_read_bytes": read,
            "dram_write_bytes": written,
            "write_back_bytes": back,
            "l2_bytes": 5,
            "tensor_instructions": {"all": 7, "wgmma": 4},
        }
        self._add("profile", run, **{"case": case, "impl": impl, "status": "ok", "counters": counters} | fields)

    def _add(self, kind: str, run: str, **fields: Any) -> None:
        self.lines.append({"schema": 1, "kind": kind, "run": run} | fields)


@pytest.fixture
def records() -> Records:
    made = Records()
    made.run()
    return made
