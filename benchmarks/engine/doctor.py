"""What this machine can run, what not and why, and what to do about it.

Owns the checks. It changes nothing: no environment is built, nothing is written. How checks are shown is the command's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.engine import environments, machine
from benchmarks.engine.environments import EnvironmentFailure, Missing
from impls import registry
from impls.baselines import baseline_of

# Room for environments: blas, xla and ceilings take 1.9 GiB on a CPU, and pip about as much while it unpacks.
CACHE_BYTES = 4 << 30
# Room for records, which are lines of JSON.
RESULTS_BYTES = 200 << 20
# Inputs and outputs pass through shared memory; a container's default of 64 MiB is too small for most cases.
SHARED_MEMORY_BYTES = 1 << 30
# CPUs' worth of work by others that a quiet machine may show; a busy program is one CPU.
OTHERS_CPUS = 0.25

#: Variables that change what a stack's libraries do, behind the harness's back. Those that set the number of threads
#: are left out: every worker gets its own (benchmarks.engine.threads).
DISTURBING = (
    *("OMP_THREAD_LIMIT", "OMP_PLACES", "OMP_SCHEDULE", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"),
    *("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "OPENBLAS_CORETYPE"),
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_VERBOSE", "DNNL_VERBOSE"),
    *("XLA_FLAGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_DISABLE_JIT", "TORCH_LOGS"),
    *("NVIDIA_TF32_OVERRIDE", "CUDA_LAUNCH_BLOCKING", "LD_PRELOAD"),
)


@dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes:
        name: what was looked at.
        ok: whether it is as it should be.
        found: what was found.
        remedy: what to do, one sentence; None where there is nothing to do.
    """

    name: str
    ok: bool
    found: str
    remedy: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """All checks, and whether the baselines can run on the default device."""

    checks: list[Check]
    baseline_ok: bool


def diagnose(results: Path = Path("results")) -> Diagnosis:
    """Look at everything. ``results`` is where records would be written."""
    checks = [check_cpu(machine.cpu()), check_quota(Path("/sys/fs/cgroup"), machine.cpu().threads), check_gpu()]
    try:
        kind = machine.default_device().kind
    except machine.NoDevice as error:
        return Diagnosis([*checks, Check("RIDGEMARK_DEVICE", False, error.message, error.remedy)], False)
    stacks = {
        stack: check_stack(stack, kind)
        for stack in registry.stacks()
        if any(kind in i.devices for i in registry.of_stack(stack))
    }
    written = check_room("results", results, RESULTS_BYTES, "Free space there, or name another folder with --out.")
    checks += [
        *stacks.values(),
        check_room("cache", environments.cache_folder(), CACHE_BYTES, "Free space there, or set RIDGEMARK_CACHE."),
        written,
        check_shared_memory(Path("/dev/shm")),
        check_variables(os.environ),
        check_governor(Path("/sys/devices/system/cpu")),
        check_load(),
    ]
    baselines = {b for workload in ("gemm", "attention") if (b := baseline_of(workload, kind))}
    vital = {baseline.partition(".")[0] for baseline in baselines}
    ready = bool(vital) and all(stack in stacks and stacks[stack].ok for stack in vital)
    return Diagnosis(checks, ready and written.ok)


def check_cpu(cpu: machine.Cpu) -> Check:
    """Which CPU, how many cores, and which instruction sets that matter here."""
    where = f", a virtual machine ({cpu.hypervisor})" if cpu.hypervisor else ""
    counts = f"{cpu.cores} cores" + (f", {cpu.threads} threads" if cpu.threads != cpu.cores else "")
    total = os.cpu_count() or cpu.threads
    if cpu.threads < total:
        counts += f" ({cpu.threads} of {total} CPUs by this process's affinity)"
    features = ", ".join(sorted(cpu.features)) or "no vector extensions known"
    lacking = [n for n, f in (("AMX", "amx_tile"), ("AVX-512", "avx512f")) if f not in cpu.features]
    lacks = f"; no {' or '.join(lacking)}" if cpu.arch == "x86_64" and lacking else ""
    remedy = None if cpu.features else "Install util-linux (lscpu): without it no stack knows what it may use."
    return Check("CPU", bool(cpu.features), f"{cpu.name}, {counts}{where}; {features}{lacks}", remedy)


def check_quota(cgroup: Path, threads: int) -> Check:
    """Whether a control group gives this process less CPU time than its threads could use."""
    text = machine.read_text(cgroup / "cpu.max").split()
    if len(text) == 2 and text[0].isdigit():
        quota = int(text[0]) / int(text[1])
        if quota < threads:
            return Check(
                "CPU quota",
                False,
                f"{quota:.3g} CPUs for {threads} threads: calls are stopped in the middle when the quota is used up",
                f"Raise the container's CPU limit, or restrict the affinity: taskset -c 0-{max(0, int(quota) - 1)} ...",
            )
    return Check("CPU quota", True, "none below the affinity")


def check_gpu() -> Check:
    """Whether there is an NVIDIA GPU, and whether it can be seen."""
    if machine.gpus():
        return Check("GPU", True, "; ".join(f"{g.name} ({g.arch}, driver {g.driver})" for g in machine.gpus()))
    if Path("/dev/nvidiactl").exists():
        return Check(
            "GPU",
            False,
            "an NVIDIA driver is here, but NVML shows no GPU",
            "Install nvidia-ml-py into the harness's environment (pip install 'ridgemark[gpu]'), "
            "and look at CUDA_VISIBLE_DEVICES.",
        )
    return Check("GPU", True, "none: cases run on the CPU")


def check_stack(stack: str, family: str) -> Check:
    """Whether ``stack`` has an environment on ``family`` whose imports work."""
    name = f"{stack} ({family})"
    try:
        needs = environments.load_needs(stack, family)
        found = environments.find(stack, family)
    except EnvironmentFailure as failure:
        return Check(name, False, failure.message, failure.remedy)
    if isinstance(found, Missing):
        return Check(name, False, found.reason, found.remedy)
    trouble = environments.import_trouble(found.python, needs)
    if trouble:
        return Check(
            name,
            False,
            f"{found.python} does not work: {trouble}.",
            f"Delete {found.python.parent.parent} and build it again."
            if found.origin == "built"
            else f"Mend that interpreter, or correct {environments.interpreter_map_file()}.",
        )
    # A built environment's folder is named by its lock and its Python.
    return Check(name, True, f"{found.origin}: {found.python.parent.parent.name if found.lock else found.python}")


def check_room(name: str, folder: Path, needed: int, remedy: str) -> Check:
    """Whether ``folder`` (or the nearest folder above it that exists) can be written and has ``needed`` bytes free."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(f"{name} folder", False, f"{there} cannot be written", remedy)
    free = shutil.disk_usage(there).free
    found = f"{folder}: {free / 2**30:,.1f} GiB free"
    if free < needed:
        return Check(f"{name} folder", False, f"{found}, {needed / 2**30:,.1f} GiB may be needed", remedy)
    return Check(f"{name} folder", True, found)


def check_shared_memory(place: Path) -> Check:
    """Whether shared memory is there and holds the inputs and outputs of a case."""
    remedy = (
        "Enlarge it (docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm); until then files take its place."
    )
    if not place.is_dir():
        return Check("shared memory", False, f"{place} is not there", remedy)
    free = shutil.disk_usage(place).free
    return Check(
        "shared memory",
        free >= SHARED_MEMORY_BYTES,
        f"{place}: {free / 2**30:,.2f} GiB free",
        None if free >= SHARED_MEMORY_BYTES else remedy,
    )


def check_variables(environ: Mapping[str, str]) -> Check:
    """Whether variables are set that change what the stacks' libraries do."""
    found = [f"{name}={environ[name]}" for name in DISTURBING if name in environ]
    if found:
        return Check("environment variables", False, ", ".join(found), "Unset them: workers inherit them.")
    return Check("environment variables", True, "none that would disturb")


def check_governor(sys_cpu: Path) -> Check:
    """Whether the clock is left to a governor that saves power."""
    governors = {machine.read_text(f) for f in sys_cpu.glob("cpu[0-9]*/cpufreq/scaling_governor")} - {""}
    if governors - {"performance"}:
        return Check(
            "clock",
            False,
            f"governor {', '.join(sorted(governors))}",
            "Choose the performance governor: cpupower frequency-set -g performance.",
        )
    return Check("clock", True, "performance governor" if governors else "not ours to set here")


def check_load(seconds: float = 0.5) -> Check:
    """Whether other programs, or other virtual machines on the same host, use the CPUs during ``seconds``."""
    for process in psutil.process_iter():
        _cpu_percent(process)
    usage = psutil.cpu_times_percent(interval=seconds)
    cpus = psutil.cpu_count() or 1
    stolen = getattr(usage, "steal", 0.0) / 100 * cpus
    busy = max(0.0, 100 - usage.idle - getattr(usage, "iowait", 0.0)) / 100 * cpus
    found = f"{busy:.2f} of {cpus} CPUs in use"
    shares = ((_cpu_percent(p), p) for p in psutil.process_iter(["name"]) if p.pid != os.getpid())
    loud = sorted(((share, p.info["name"] or "?") for share, p in shares if share > 5), reverse=True)[:3]
    if loud:
        found += f", by {', '.join(name for _, name in loud)}"
    if stolen >= 0.01:
        found += f", {stolen:.2f} of them taken by the host"
    ok = busy < OTHERS_CPUS
    return Check("other load", ok, found, None if ok else "Stop other programs while you measure; times suffer.")


def _cpu_percent(process: psutil.Process) -> float:
    try:
        return float(process.cpu_percent())
    except psutil.Error:
        return 0.0
