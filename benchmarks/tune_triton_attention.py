"""Searches the tiles of Triton's attention kernels in the regime in which they are reported, and keeps the best.

``python -m benchmarks.tune_triton_attention [--seconds S] [CASE ...]`` times each kernel of each case by itself in
burst on this machine's GPU and writes ``impls/triton/tuned/<device>.json``, which implementations read. Owns the
search: the space and what prunes it are in ``impls.triton.attention_tiles``. Candidates are compiled first, in
parallel; those that spill registers are dropped. Whether a choice computes the right thing is judged with every
measurement, as ever.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from benchmarks.engine import cases as case_files
from benchmarks.engine import machine
from benchmarks.engine.timing import cupti
from impls.contract import Device, Program
from impls.triton import attention, choices
from impls.triton.attention_tiles import IMPLEMENTATIONS, Tiles, choose, space
from impls.workloads.attention import Attention
from impls.workloads.base import parse_case
from impls.workloads.dtypes import dtype

# Kernels of a call that are timed where a kernel's tiles are searched: decode's parts also have to be put together.
_TIMED = {"decode": ("forward", "combine")}
# Calls of the first look at each candidate and of each later round; candidates in those rounds; rounds.
_LOOK, _CALLS, _FINALISTS, _ROUNDS = 4, 8, 3, 3
_MOST_SPILLS = 64

Candidate = tuple[str, str, Tiles]  # case id, kernel, tiles


class _Kernel(Program):
    """Some launches of a call, over random inputs that are made on the device."""

    def __init__(self, case: Attention, kernel: str, tiles: Tiles, device: Device, tensors: dict[str, Any]) -> None:
        super().__init__()
        from impls.triton.kernels import attention_launches as launches
        from impls.triton.kernels.program import Launch

        kind = IMPLEMENTATIONS[kernel].partition(".")[2]
        implementation = next(
            i for i in (attention.Flash, attention.FlashTma, attention.Decode) if i.name.endswith(kind)
        )
        others = {k: choose(k, case, device)[0] for k in implementation()._kernels(case)}
        self.work = getattr(launches, kind)(case, others | {kernel: tiles}, tensors)
        wanted = _TIMED.get(kernel, (kernel,))
        self.launches = [
            launch for launch in self.work.launches if isinstance(launch, Launch) and launch.kernel.__name__ in wanted
        ]

    def load(self, inputs: Any) -> Any:
        """Nothing: tensors are given."""

    def refill(self, loaded: Any, inputs: Any) -> Any:
        """Nothing."""

    def run(self, loaded: Any) -> None:
        """The kernels."""
        for call in loaded:
            call()

    def read_outputs(self, result: Any) -> dict[str, np.ndarray]:
        """None are looked at."""
        return {}

    def read_inputs(self, loaded: Any) -> dict[str, np.ndarray]:
        """None are looked at."""
        return {}

    def synchronize(self) -> None:
        """Wait for the device."""
        import torch

        torch.cuda.synchronize()


def tensors_of(case: Attention) -> dict[str, Any]:
    """Normal inputs and empty outputs on the device."""
    import torch

    from impls.support.torch_arrays import torch_dtype

    generator = torch.Generator("cuda").manual_seed(1)
    made = {}
    for name, spec in (case.input_specs() | case.output_specs()).items():
        tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="cuda")
        made[name] = tensor.normal_(generator=generator) if name in case.input_specs() else tensor
    return made


def kernels_of(case: Attention, device: Device) -> list[str]:
    """The kernels whose tiles are searched for a case."""
    found: list[str] = []
    for implementation in (attention.Flash(), attention.FlashTma(), attention.Decode()):
        if implementation.refuses(case, device) is None:
            found += implementation._kernels(case)
    if case.sq == 1:
        return ["decode"] if "decode" in found else []
    return [k for k in found if k.startswith("backward") == (case.direction == "bwd")]


def _compile(candidate: Candidate, device: Device) -> str | None:
    """In a process of its own: compile into Triton's cache; why the candidate is dropped, or None."""
    import torch

    from impls.support.torch_arrays import torch_dtype

    case_id, kernel, tiles = candidate
    case = parse_case(case_id)
    assert isinstance(case, Attention)
    try:
        tensors = {
            name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="cuda")
            for name, spec in (case.input_specs() | case.output_specs()).items()
        }
        for launch in _Kernel(case, kernel, tiles, device, tensors).launches:
            compiled = launch.compiled
            _ = compiled.run
            if compiled.n_spills > _MOST_SPILLS:
                return f"{compiled.n_spills} spills"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def compiled(candidates: Sequence[Candidate], device: Device, deadline: float) -> dict[Candidate, str | None]:
    """Compile in parallel until the deadline; per candidate why it is dropped, or None."""
    outcome: dict[Candidate, str | None] = dict.fromkeys(candidates, "not compiled in time")
    workers = max(1, min(len(candidates), (os.cpu_count() or 2)))
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(_compile, c, device): c for c in candidates}
        for future in as_completed(futures, timeout=max(1.0, deadline - time.monotonic())):
            outcome[futures[future]] = None if future.exception() is None else repr(future.exception())
            if future.exception() is None:
                outcome[futures[future]] = future.result()
    except TimeoutError:
        pass
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
    return outcome


def search(case: Attention, kernel: str, tiles: Sequence[Tiles], device: Device, deadline: float) -> dict[str, Any]:
    """A look at every candidate, then rounds over the best few.

    Returns:
        ``choice``, ``time_us``, ``second``, ``second_us``, ``tried`` and ``seconds`` (the time that the search took).
    """
    import torch

    begin = time.monotonic()
    tensors = tensors_of(case)
    programs: dict[Tiles, tuple[_Kernel, Any]] = {}
    looks: dict[Tiles, float] = {}

    def look(tile: Tiles, calls: int) -> float:
        program, loaded = programs[tile]
        samples = cupti.block(program, {0: loaded}, [0] * (calls + 1), {}, False)["samples_us"][1:]
        return float(np.median(samples))

    for tile in tiles:
        if time.monotonic() > deadline:
            break
        try:
            program = _Kernel(case, kernel, tile, device, tensors)
            for residual in program.work.residuals:
                residual.bound()() if hasattr(residual, "bound") else residual()
            programs[tile] = program, [launch.bound() for launch in program.launches]
            looks[tile] = look(tile, _LOOK)
        except Exception as error:
            print(f"{case.id}: {kernel} {tile}: {type(error).__name__}: {str(error)[:200]}")
            continue
        for other in list(programs):  # only the best few are looked at again
            if other not in sorted(looks, key=looks.__getitem__)[:_FINALISTS]:
                del programs[other]
    best = sorted(programs, key=looks.__getitem__)
    times: dict[Tiles, list[float]] = {tile: [looks[tile]] for tile in best}
    for _ in range(_ROUNDS if len(best) > 1 else 0):
        for tile in best:
            if time.monotonic() < deadline:
                times[tile].append(look(tile, _CALLS))
    medians = {tile: float(np.median(times[tile][1:] or times[tile])) for tile in best}
    ranked = sorted(medians, key=medians.__getitem__)
    programs.clear()
    torch.cuda.empty_cache()
    for tile in sorted(looks, key=looks.__getitem__):
        print(f"  {case.id} {kernel} {tuple(asdict(tile).values())} {looks[tile]:.1f}", flush=True)
    return {
        "choice": asdict(ranked[0]),
        "time_us": round(medians[ranked[0]], 2),
        "second": asdict(ranked[1]) if len(ranked) > 1 else None,
        "second_us": round(medians[ranked[1]], 2) if len(ranked) > 1 else None,
        "tried": len(looks),
        "seconds": round(time.monotonic() - begin, 1),
    }


def keep(case: Attention, kernel: str, found: dict[str, Any], device: Device) -> None:
    """Write one kernel's choice into the device's file, beside what is there."""
    path = choices.tuned_file(device.name)
    path.parent.mkdir(exist_ok=True)
    kept: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"device": device.name, "choices": {}}
    entry = kept.setdefault("choices", {}).setdefault(IMPLEMENTATIONS[kernel], {}).setdefault(case.id, {"choice": {}})
    entry["choice"][kernel] = found["choice"]
    entry.setdefault("search", {})[kernel] = {k: v for k, v in found.items() if k != "choice"}
    entry["when"] = datetime.now(UTC).isoformat(timespec="seconds")
    path.write_text(json.dumps(kept, indent=1) + "\n")


def tune(plan: Sequence[tuple[Attention, str, Sequence[Tiles]]], device: Device, seconds: float) -> None:
    """Compile all candidates of the plan, then search them in its order, within ``seconds``."""
    begin = time.monotonic()
    candidates = [(case.id, kernel, tile) for case, kernel, tiles in plan for tile in tiles]
    outcome = compiled(candidates, device, begin + 0.5 * seconds)
    dropped = {c: why for c, why in outcome.items() if why}
    print(f"{len(candidates)} compiled in {time.monotonic() - begin:.1f} s, {len(dropped)} dropped", flush=True)
    for (case_id, kernel, tile), why in dropped.items():
        print(f"  {case_id} {kernel} {tuple(asdict(tile).values())}: {why}")
    for case, kernel, tiles in plan:
        left = [tile for tile in tiles if outcome[(case.id, kernel, tile)] is None]
        if not left or time.monotonic() > begin + seconds:
            print(f"{case.id}: {kernel}: nothing to time")
            continue
        found = search(case, kernel, left, device, begin + seconds)
        keep(case, kernel, found, device)
        rate = case.flops() / found["time_us"] / 1e6
        print(
            f"{case.id}: {kernel}: {found['time_us']} us, {rate:.0f} TFLOP/s of the case: {found['choice']}", flush=True
        )


def main() -> None:
    """Search and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="time for all of it (default 600)")
    parser.add_argument("case", nargs="*", help="cases in place of flagship's attentions")
    arguments = parser.parse_args()
    device = machine.device("cuda")
    wanted = [parse_case(c) for c in arguments.case] or [e.case for e in case_files.load("flagship")]
    plan = [
        (replace(case), kernel, list(space(kernel, case.d, dtype(case.dtype).bytes, device.arch)))
        for case in wanted
        if isinstance(case, Attention)
        for kernel in kernels_of(case, device)
    ]
    tune(plan, device, arguments.seconds)


if __name__ == "__main__":
    main()
