"""Counted traffic: what one call of an implementation moves and executes, by the GPU's own counters (Nsight Compute).

Owns starting ``ncu`` over a stack's processes (``engine.profiled``), the metrics asked for, the reading of ncu's CSV
and what the counters of a window mean. Records are of kind ``profile``; the analysis joins them to results that are
``ok``, since counts of a call that nobody judged are worth nothing. What the records of this machine hold as anything
else is therefore not profiled, and what they do not hold only where it is asked for by name.

What a window gives. ncu runs the kernels of a call one after the other and counts each; between them nothing is
counted. DRAM reads are those during the call's kernels. DRAM writes come in two parts: lines written back while the
call's kernels ran, and lines that were still dirty in L2 at the end of the last one, which the sweep after the call
drives out: ``write_back_bytes``. The sweep itself writes nothing. What the first sweep of the window writes, with L2
clean before it, is the method's own and is recorded beside (``residue_bytes``), not subtracted. All metrics must be
had in one pass: ncu would repeat each kernel otherwise, after restoring memory, and no repetition but the first would
see a cold L2. Copies and memsets are no kernels and are not counted.

Tensor instructions are counted per warp: a warpgroup's ``wgmma`` counts four times. Counters of executed operations by
dtype exist (``sm__ops_path_tensor_src_*``; on an H200 they gave 2MNK exactly for cuBLAS's 4096^3 in tf32, f16, bf16,
f8 and i8) but with them ncu takes eight passes.

Calibration. Every run counts, last where nothing else of their stacks is asked for, two calls whose traffic and
arithmetic are known: cuBLAS's bf16 4096^3, whose 2MNK over its tensor instructions gives the FLOPs of one (65536 on an
H200: a quarter of an m64n128k16, as the kernel's tile of 128 columns says), and a copy of 256 MiB, of which all must be
read and all must be written.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.engine import pool, records
from benchmarks.engine.environments import Environment
from benchmarks.engine.profiled import SWEEP
from benchmarks.engine.session import ROOT, circumstances
from impls.contract import Device

#: (implementation, case) of the calls that calibrate every run.
PRODUCT = ("cublas.default", "gemm:4096x4096x4096:bf16")
COPY = ("ceilings.gpu", "ceiling:copy:256MiB:repeats=1")

_READ, _WRITE, _L2 = "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum"
_BUSY = "gpu__time_duration.sum"
# Warp instructions: of all tensor pipes, and wgmma among them.
_INSTRUCTIONS = {"all": "sm__inst_executed_pipe_tensor.sum", "wgmma": "sm__inst_executed_pipe_tensor_op_gmma.sum"}
METRICS = (_READ, _WRITE, _L2, *_INSTRUCTIONS.values(), _BUSY)
_PASSES = "profiler__replayer_passes"
# Architectures that have all of them.
_ARCHITECTURES = ("sm_90",)
_BASE_UNITS = {"byte", "inst", "ns"}

_START_S, _PROGRAM_S = 90.0, 30.0
# The share of a process's time after which it begins no further call: ncu writes what it counted when that has ended.
_BEGINNING = 0.8
_LONGEST_NAME = 160

Program = tuple[str, str]


class NoProfiler(Exception):
    """Nothing can be counted here. The message says why and what to do."""


class Unreadable(Exception):
    """What ncu wrote is not what was asked for; the message is one sentence."""


@dataclass(frozen=True)
class Kernel:
    """One kernel that ncu profiled: its name, and its metrics in bytes, instructions and nanoseconds."""

    name: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Window:
    """One call and the sweeps around it."""

    before: Kernel
    call: tuple[Kernel, ...]
    after: Kernel

    def counters(self) -> dict[str, Any]:
        """The call's counters, as in the record."""
        total = {metric: sum(kernel.values[metric] for kernel in self.call) for metric in METRICS}
        return {
            "dram_read_bytes": round(total[_READ]),
            "dram_write_bytes": round(total[_WRITE]),
            "write_back_bytes": round(self.after.values[_WRITE]),
            "l2_bytes": round(total[_L2]),
            "tensor_instructions": {name: round(total[metric]) for name, metric in _INSTRUCTIONS.items()},
            "busy_us": total[_BUSY] / 1e3,
        }


def find_ncu() -> Path:
    """Nsight Compute's command, on PATH or in the toolkit.

    Raises:
        NoProfiler: there is none.
    """
    places = [os.environ.get("PATH", "")]
    places += [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places += ["/usr/local/cuda/bin", *map(str, sorted(Path("/opt/nvidia/nsight-compute").glob("*"), reverse=True))]
    found = shutil.which("ncu", path=os.pathsep.join(places))
    if found is None:
        raise NoProfiler("Nsight Compute's command ncu is not on PATH. Install it with the CUDA toolkit.")
    return Path(found)


def judged(loaded: records.Loaded) -> dict[Program, bool]:
    """Whether the latest burst result of an (implementation, case) pair is ``ok``; pairs that have one."""
    latest: dict[Program, bool] = {}
    for result in sorted(records.results(loaded), key=lambda r: str(r["run"])):  # run ids sort by time
        if result["replica"] == 0 and result["regime"] == "burst":
            latest[result["impl"], result["case"]] = result["status"] == "ok"
    return latest


# -- what ncu wrote ---------------------------------------------------------------------------------------------------


def read(log: str) -> list[Window]:
    """The windows in ncu's log: messages, and the raw page as CSV, a row of units under the header.

    A window that lacks its last sweep (the process died in it) is left out.

    Raises:
        Unreadable: ncu reports an error, needed more than one pass, or the CSV lacks what was asked for.
    """
    lines = log.splitlines()
    errors = [line for line in lines if line.startswith("==ERROR==")]
    if errors:
        raise Unreadable(f"Nsight Compute says: {errors[0].removeprefix('==ERROR==').strip()}")
    return list(_windows(_kernels(lines)))


def _kernels(lines: Sequence[str]) -> Iterator[Kernel]:
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise Unreadable("Nsight Compute profiled nothing.")
    rows = csv.DictReader(line for line in lines[start:] if line.startswith('"'))
    lacking = {"Kernel Name", _PASSES, *METRICS} - set(rows.fieldnames or ())
    if lacking:
        raise Unreadable(f"Nsight Compute's table has no {sorted(lacking)[0]}.")
    units = next(rows)
    odd = {units[metric] for metric in METRICS} - _BASE_UNITS
    if odd:
        raise Unreadable(f"Nsight Compute gives {sorted(odd)[0]!r} where a base unit was asked for.")
    for row in rows:
        try:
            values = {metric: float(row[metric].replace(",", "")) for metric in METRICS}
        except ValueError:
            raise Unreadable(f"Nsight Compute has no number for a metric of {row['Kernel Name']}.") from None
        if row[_PASSES] != "1":
            raise Unreadable(f"Nsight Compute took {row[_PASSES]} passes: all but the first did not see a cold L2.")
        yield Kernel(row["Kernel Name"], values)


def _windows(kernels: Iterator[Kernel]) -> Iterator[Window]:
    before: Kernel | None = None
    call: list[Kernel] = []
    for kernel in kernels:
        if not kernel.name.startswith(SWEEP):
            call.append(kernel)
        elif before is None:
            before, call = kernel, []
        else:
            yield Window(before, tuple(call), kernel)
            before = None


# -- a run ------------------------------------------------------------------------------------------------------------


class Run:
    """One run of the profiler over programs of several stacks; appends to one records file.

    Args:
        programs: (implementation, case) pairs. Stacks are counted in the order in which they first appear, each as a
            whole. The calibrating programs come first in their stacks, whether or not they are among them.
        environments: stack -> its environment.
        missing: stack -> why it has none, one sentence.
        seed: of the inputs.
        budget_s: seconds after which no stack is begun and the present one is ended; None without. What was not begun
            in time has no line.

    Raises:
        NoProfiler: no ncu, or a device whose counters have other names.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        device: Device,
        environments: Mapping[str, Environment],
        missing: Mapping[str, str],
        writer: records.Writer,
        seed: int,
        budget_s: float | None = None,
    ) -> None:
        if device.arch not in _ARCHITECTURES:
            raise NoProfiler(
                f"The counters are known for {' and '.join(_ARCHITECTURES)}, and {device.name} is {device.arch}: "
                "give their names in benchmarks/profile.py."
            )
        self._ncu = find_ncu()
        self._device, self._environments, self._missing = device, environments, missing
        self._writer, self._seed, self._budget_s = writer, seed, math.inf if budget_s is None else budget_s
        by_stack: dict[str, dict[Program, None]] = {}
        for program in (*programs, PRODUCT, COPY):
            by_stack.setdefault(program[0].partition(".")[0], {})[program] = None
        self._stacks = {
            stack: tuple({p: None for p in (PRODUCT, COPY) if p in wanted} | wanted)
            for stack, wanted in by_stack.items()
        }
        self.lines: list[dict[str, Any]] = []

    def run(self, progress: Callable[[str], None]) -> bool:
        """Profile everything, stack after stack; each stack's lines are recorded as soon as it is done.

        Returns:
            False where Ctrl-C or the budget ended it early.
        """
        begin = time.monotonic()
        cases = dict.fromkeys(case for wanted in self._stacks.values() for _, case in wanted)
        impls = dict.fromkeys(impl for wanted in self._stacks.values() for impl, _ in wanted)
        self._writer.append(
            "run",
            **circumstances(self._device, self._seed),
            plan={"cases": list(cases), "impls": list(impls), "budget_s": None, "regime": records.COUNTED},
        )
        interrupted = False
        version = self._version()
        try:
            for stack, wanted in self._stacks.items():
                left = self._budget_s - (time.monotonic() - begin)
                if left <= 0:
                    interrupted = True
                    break
                progress(f"{stack}: {len(wanted)} calls under Nsight Compute")
                lines = list(self._profile(stack, wanted, left))
                interrupted |= len(lines) < len(wanted)
                for line in lines:
                    about = {
                        "ncu": version,
                        "seed": self._seed,
                        "when": datetime.now(UTC).isoformat(timespec="seconds"),
                    }
                    self.lines.append(self._writer.append("profile", **line, **about))
        except KeyboardInterrupt:
            interrupted = True
        self._writer.append("end", interrupted=interrupted, phases={})
        return not interrupted

    def _version(self) -> str:
        said = subprocess.run([self._ncu, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        found = re.search(r"Version (\S+)", said.stdout)
        return found[1] if found else "unknown"

    def _profile(self, stack: str, wanted: Sequence[Program], left_s: float) -> Iterator[dict[str, Any]]:
        """The record lines of one stack's programs, each exactly once, but for those that time did not suffice for."""
        environment = self._environments.get(stack)
        if environment is None:
            for impl, case in wanted:
                yield _line(impl, case, "unsupported", self._missing.get(stack, f"{stack} has no environment."))
            return
        with tempfile.TemporaryDirectory(prefix="ridgemark-profile-") as name:
            folder = Path(name)
            limit_s = min(left_s, _START_S + _PROGRAM_S * len(wanted))
            job = {
                "device": asdict(self._device) | {"features": sorted(self._device.features)},
                "seed": self._seed,
                "seconds": _BEGINNING * limit_s,
                "programs": [{"impl": impl, "case": case} for impl, case in wanted],
            }
            (folder / "job.json").write_text(json.dumps(job))
            end = self._watch(environment, folder, limit_s)
            answered = folder / "answers.jsonl"
            answers = [json.loads(line) for line in answered.read_text().splitlines()] if answered.exists() else []
            log = folder / "ncu.log"
            trouble, windows = None, []
            try:
                windows = read(log.read_text(errors="replace") if log.exists() else "")
            except Unreadable as error:
                trouble = str(error)
        for (impl, case), answer in zip(wanted, [*answers, *[None] * len(wanted)], strict=False):
            if answer is None:
                yield _line(impl, case, "failed", f"The profiled process ended before it: {end}")
            elif answer["status"] == "left":
                continue
            elif answer["status"] != "ok":
                yield _line(impl, case, answer["status"], answer["reason"])
            elif trouble or answer["window"] >= len(windows):
                yield _line(impl, case, "failed", trouble or "Nsight Compute has no counters of this call.")
            elif not windows[answer["window"]].call:
                yield _line(impl, case, "failed", "Nsight Compute saw no kernel in this call.")
            else:
                window = windows[answer["window"]]
                yield _line(impl, case, "ok", None) | {
                    "counters": window.counters(),
                    "kernels": [kernel.name[:_LONGEST_NAME] for kernel in window.call],
                    "residue_bytes": round(window.before.values[_WRITE]),
                    "config": answer["config"],
                }

    def _watch(self, environment: Environment, folder: Path, limit_s: float) -> str:
        """Run the profiled process under ncu; how it ended, in words."""
        command: list[str | Path] = [self._ncu, "--clock-control", "none", "--cache-control", "none"]
        command += ["--profile-from-start", "off", "--target-processes", "application-only"]
        command += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", folder / "ncu.log"]
        command += ["--metrics", ",".join(METRICS), environment.python, "-m", "benchmarks.engine.profiled"]
        command += [folder / "job.json", folder / "answers.jsonl"]
        with (folder / "output").open("w+b") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=pool.environment(ROOT, self._device, self._device.threads, environment.environ),
                start_new_session=True,
            )
            try:
                status = process.wait(limit_s)
                end = f"status {status}"
            except subprocess.TimeoutExpired:
                end = f"it was ended after {limit_s:.0f} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            said = output.read().decode(errors="replace").strip().splitlines()
        return f"{end}; it last said: {said[-1][:200]}" if said else f"{end}."


def _line(impl: str, case: str, status: str, reason: str | None) -> dict[str, Any]:
    nothing: dict[str, Any] = {"counters": None, "kernels": [], "residue_bytes": None, "config": {}}
    return {"case": case, "impl": impl, "status": status, "reason": reason, **nothing}
