"""This machine: its description for the record, its stable name, the device that cases run on, and what it cannot beat.

Owns what can be read without measuring (lscpu, sysfs, cgroups, NVML) and the physical bounds that make a time
impossible. It does not own measured ceilings, which are results like any other; it only says which of them to measure
here. Linux is where all of it is known; elsewhere what is unknown is left out, and no bound is claimed.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from impls.ceilings import cpu_ceiling_cases, gpu_ceiling_cases
from impls.contract import Device
from impls.workloads.base import Case
from impls.workloads.ceiling import Ceiling

ROOT = Path(__file__).resolve().parents[2]
# What NVML may take to describe a GPU.
_ASKING_SECONDS = 30.0


class NoDevice(LookupError):
    """The device that was asked for is not there.

    Attributes:
        message: what is not there, one sentence.
        remedy: what to do about it, one sentence.
    """

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message} {remedy}")
        self.message = message
        self.remedy = remedy


# --- CPU ------------------------------------------------------------------------------------------------------------

#: Instruction-set features that a stack may ask for or that a bound rests on, as Linux names them.
FEATURES = frozenset(
    (
        *("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni", "avx_vnni_int8"),
        *("amx_tile", "amx_bf16", "amx_int8", "amx_fp16", "amx_tf32", "amx_fp8"),
        *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme", "sme2"),
    )
)

# Server microarchitectures that a virtual machine's brand ("AMD EPYC", "Intel Xeon Processor") hides: vendor, family,
# models. Sources: Linux, arch/x86/include/asm/intel-family.h; AMD's revision guides for families 17h, 19h and 1Ah.
_MICROARCHITECTURES = (
    ("AuthenticAMD", 23, range(0x31, 0x32), "rome"),
    ("AuthenticAMD", 25, range(0x00, 0x10), "milan"),
    ("AuthenticAMD", 25, range(0x10, 0x20), "genoa"),
    ("AuthenticAMD", 25, range(0xA0, 0xB0), "bergamo"),
    ("AuthenticAMD", 26, range(0x00, 0x20), "turin"),
    ("GenuineIntel", 6, range(0x55, 0x56), "skylake-sp"),
    ("GenuineIntel", 6, range(0x6A, 0x6B), "ice-lake-sp"),
    ("GenuineIntel", 6, range(0x8F, 0x90), "sapphire-rapids"),
    ("GenuineIntel", 6, range(0xCF, 0xD0), "emerald-rapids"),
    ("GenuineIntel", 6, range(0xAD, 0xAE), "granite-rapids"),
)

# cpufreq drivers whose cpuinfo_max_freq includes the boost clock; acpi-cpufreq's on AMD, for one, does not.
# Source: Linux, Documentation/admin-guide/pm (intel_pstate.rst, amd-pstate.rst, cpufreq.rst).
_BOOST_AWARE = ("intel_pstate", "intel_cpufreq", "amd-pstate", "amd-pstate-epp", "cppc_cpufreq")


@dataclass(frozen=True)
class Cache:
    """One kind of cache among the CPUs that this process may use.

    Attributes:
        level: 1, 2, 3.
        kind: ``data``, ``unified`` (instruction caches are left out).
        bytes: size of one instance.
        shared_by: CPUs of this process that share one instance.
        instances: how many instances there are.
    """

    level: int
    kind: str
    bytes: int
    shared_by: int
    instances: int


@dataclass(frozen=True)
class Cpu:
    """The CPUs that this process may use.

    Attributes:
        name: the vendor's name.
        microarchitecture: code name where it is known, e.g. ``genoa``.
        arch: ``x86_64``, ``aarch64``.
        features: those of FEATURES that it has.
        threads: CPUs in this process's affinity.
        cores: physical cores they belong to, as far as the system shows it.
        sockets: packages they belong to.
        caches: data caches, by level; empty where the system hides them.
        boost_hz: highest clock where the system states one that includes boost, else None.
        hypervisor: whose virtual machine this is, None on bare metal.
    """

    name: str
    microarchitecture: str | None
    arch: str
    features: frozenset[str]
    threads: int
    cores: int
    sockets: int
    caches: tuple[Cache, ...] = ()
    boost_hz: float | None = None
    hypervisor: str | None = None


def read_cpu(listing: str, affinity: Iterable[int], sys_cpu: Path = Path("/sys/devices/system/cpu")) -> Cpu:
    """The CPU as ``lscpu --json`` (``listing``) and sysfs describe it, as far as ``affinity`` reaches."""
    fields = _lscpu_fields(listing)
    cpus = [sys_cpu / f"cpu{n}" for n in sorted(affinity)]
    flags = frozenset(fields.get("Flags", "").split())
    hypervisor = fields.get("Hypervisor vendor") or ("unknown" if "hypervisor" in flags else None)
    cores = {read_text(c / "topology/thread_siblings_list") or str(c) for c in cpus}
    sockets = {read_text(c / "topology/physical_package_id") or "0" for c in cpus}
    return Cpu(
        name=fields.get("Model name") or platform.processor() or "unknown CPU",
        microarchitecture=_microarchitecture(fields),
        arch=platform.machine(),
        features=flags & FEATURES,
        threads=len(cpus),
        cores=len(cores),
        sockets=len(sockets),
        caches=_caches(cpus),
        boost_hz=_boost_hz(cpus),
        hypervisor=hypervisor,
    )


@cache
def cpu() -> Cpu:
    """The CPUs that this process may use."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    try:
        listing = subprocess.run(
            ["lscpu", "--json"], capture_output=True, text=True, timeout=20, env=os.environ | {"LC_ALL": "C"}
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        listing = ""
    return read_cpu(listing, affinity)


def _lscpu_fields(listing: str) -> dict[str, str]:
    fields: dict[str, str] = {}

    def collect(entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            fields[entry["field"].rstrip(":")] = entry.get("data") or ""
            collect(entry.get("children", []))

    with suppress(ValueError, KeyError, TypeError):
        collect(json.loads(listing)["lscpu"])
    return fields


def _microarchitecture(fields: dict[str, str]) -> str | None:
    try:
        family, model = int(fields["CPU family"]), int(fields["Model"])
    except (KeyError, ValueError):
        return None
    if not re.search("EPYC|Xeon", fields.get("Model name", "")):
        return None
    for vendor, known_family, models, name in _MICROARCHITECTURES:
        if fields.get("Vendor ID") == vendor and family == known_family and model in models:
            return name
    return None


def _caches(cpus: Sequence[Path]) -> tuple[Cache, ...]:
    instances: dict[tuple[int, str, str], list[int]] = {}
    for folder in (index for c in cpus for index in sorted((c / "cache").glob("index*"))):
        kind, size = read_text(folder / "type").lower(), re.fullmatch(r"(\d+)([KMG]?)", read_text(folder / "size"))
        if kind not in ("data", "unified") or not size:
            continue
        nbytes = int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]]
        key = (int(read_text(folder / "level")), kind, read_text(folder / "shared_cpu_list") or str(folder))
        instances.setdefault(key, []).append(nbytes)
    grouped: dict[tuple[int, str, int], list[int]] = {}
    for (level, kind, _), sizes in instances.items():
        grouped.setdefault((level, kind, sizes[0]), []).append(len(sizes))
    return tuple(
        Cache(level, kind, nbytes, max(sharers), len(sharers))
        for (level, kind, nbytes), sharers in sorted(grouped.items())
    )


def _boost_hz(cpus: Sequence[Path]) -> float | None:
    clocks = []
    for folder in (c / "cpufreq" for c in cpus):
        khz = read_text(folder / "cpuinfo_max_freq")
        if read_text(folder / "scaling_driver") not in _BOOST_AWARE or not khz.isdigit():
            return None
        clocks.append(1e3 * int(khz))
    return max(clocks, default=None)


def read_text(file: Path) -> str:
    """The file's text without surrounding blanks; empty where it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def memory_bytes(root: Path = Path("/")) -> int:
    """Main memory that this process may use: the machine's, or the least limit of its control groups."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [total]
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            value = read_text(folder / name)
            if value.isdigit():
                limits.append(int(value))
            if folder == top:
                break
    return min(limits)


# --- GPU ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU, as NVML describes it.

    Attributes:
        name: the vendor's name.
        arch: ``sm_90``.
        memory_bytes: its memory.
        driver: the driver's version.
        cuda_cores: FP32 lanes.
        max_clock_hz: highest SM clock.
        memory_bytes_per_s: memory bandwidth at the highest memory clock (two transfers per clock).
        power_limit_w: enforced power limit.
    """

    name: str
    arch: str
    memory_bytes: int
    driver: str
    cuda_cores: int
    max_clock_hz: float
    memory_bytes_per_s: float
    power_limit_w: float


@cache
def gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use, in CUDA's order; none where NVML (package nvidia-ml-py) is not there."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        driver = _decoded(pynvml.nvmlSystemGetDriverVersion())
        return tuple(_gpu(pynvml, handle, driver) for handle in _visible(pynvml))
    finally:
        pynvml.nvmlShutdown()


def gpu_is_gone() -> bool:
    """Whether the GPU that was there can no longer be described: it fell off the bus, or its driver went.

    Asked in a process of its own: NVML may hang, and what it once found it remembers.
    """
    command = [sys.executable, "-c", "from benchmarks.engine import machine; raise SystemExit(not machine.gpus())"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=_ASKING_SECONDS).returncode != 0
    except subprocess.TimeoutExpired:
        return True


def _visible(nvml: Any) -> list[Any]:
    """Handles of the GPUs that CUDA_VISIBLE_DEVICES leaves; as in CUDA, the first unknown entry ends the list."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for entry in map(str.strip, named.split(",")):
        try:
            if entry.isdigit():
                handles.append(nvml.nvmlDeviceGetHandleByIndex(int(entry)))
            else:
                handles.append(nvml.nvmlDeviceGetHandleByUUID(entry.encode()))
        except nvml.NVMLError:
            break
    return handles


def _gpu(nvml: Any, handle: Any, driver: str) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory_clock_hz = 1e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)
    return Gpu(
        name=_decoded(nvml.nvmlDeviceGetName(handle)),
        arch=f"sm_{major}{minor}",
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        driver=driver,
        cuda_cores=nvml.nvmlDeviceGetNumGpuCores(handle),
        max_clock_hz=1e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        memory_bytes_per_s=2 * memory_clock_hz * nvml.nvmlDeviceGetMemoryBusWidth(handle) / 8,
        power_limit_w=nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
    )


def _decoded(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# --- for the record -------------------------------------------------------------------------------------------------


def name() -> str:
    """The stable name that results are kept under: ``RIDGEMARK_MACHINE``, or CPU, cores and GPU.

    It holds nothing that an update changes (no kernel, driver or library version), so that results stay comparable.
    """
    named = os.environ.get("RIDGEMARK_MACHINE")
    if named and _slug(named):
        return _slug(named)
    this = cpu()
    words = re.sub(r"(?i)\((r|tm)\)|@.*|\bcpu\b|\b(\d+|\w+)-core\b|\bprocessor\b", " ", this.name)
    parts = [words]
    if this.microarchitecture and this.microarchitecture not in words.lower():
        parts.append(this.microarchitecture)
    parts.append(f"{this.cores}c")
    if gpus():
        parts.append(gpus()[0].name.removeprefix("NVIDIA "))
    return _slug(" ".join(parts))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def describe() -> dict[str, Any]:
    """This machine for the record's ``run`` line: JSON values, bytes and counts as integers."""
    this = cpu()
    description: dict[str, Any] = {
        "name": name(),
        "cpu": this.name,
        "microarchitecture": this.microarchitecture,
        "arch": this.arch,
        "cores": this.cores,
        "threads": this.threads,
        "sockets": this.sockets,
        "memory_bytes": memory_bytes(),
        "caches": [asdict(c) for c in this.caches],
        "boost_hz": this.boost_hz,
        "hypervisor": this.hypervisor,
        "os": _os_name(),
        "kernel": platform.release(),
    }
    if gpus():
        description["gpu"] = [asdict(g) for g in gpus()]
    return description


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def device(kind: str) -> Device:
    """The device of this kind: ``cpu``, or ``cuda`` for the first GPU that this process may use.

    Raises:
        NoDevice: there is none.
    """
    this = cpu()
    if kind == "cpu":
        return Device("cpu", this.name, this.arch, this.threads, memory_bytes(), this.features)
    if kind == "cuda":
        if not gpus():
            raise NoDevice("No NVIDIA GPU is visible here.", "Install its driver and nvidia-ml-py, or choose the CPU.")
        first = gpus()[0]
        return Device("cuda", first.name, first.arch, this.threads, first.memory_bytes)
    raise NoDevice(f"There is no device kind {kind!r}.", "Write cpu or cuda.")


def default_device() -> Device:
    """The device that cases run on: ``RIDGEMARK_DEVICE`` (cpu or cuda), else the GPU where there is one, else the CPU.

    Raises:
        NoDevice: ``RIDGEMARK_DEVICE`` names what is not there.
    """
    return device(os.environ.get("RIDGEMARK_DEVICE") or ("cuda" if gpus() else "cpu"))


# --- what cannot be -------------------------------------------------------------------------------------------------

# A correct implementation may execute fewer FLOPs than the nominal count: two levels of Strassen's algorithm take
# (7/8)^2 of a GEMM's multiplications (Strassen 1969; exact for integers, while floats miss the tolerance), and an
# attention backward whose forward kept the probabilities takes 4 of the 5 nominal products.
LEAST_SHARE_OF_FLOPS = (7 / 8) ** 2

# Where the clock is unknown (virtual machines, hidden boost): above any CPU sold so far (Core i9-14900KS, 6.2 GHz).
CLOCK_HZ = 6.5e9

# FLOP per cycle and core from the instructions that a CPU has: (feature, dtype whose products they are, FLOP). Every
# multiply-add of the nominal count needs one lane of a multiplier, and vector units come in pairs on every core so far
# (x86: uops.info, at most two FMA ports at full width; Arm's software optimization guides: four of 128 bit, or fewer
# wider ones).
#   AVX2: 2 units x 8 lanes x 2. AVX-512: 2 x 16 x 2; VDPBF16PS and FP16 FMA twice, VPMADDUBSW and VPDPBUSD four times
#   that. AMX: TDPBF16PS is 2 x 16 x 16 x 32 FLOP in 16 cycles = 1024, TDPBUSD 2048 (Intel 64 and IA-32 Architectures
#   Optimization Reference Manual, AMX chapter); doubled here, since rates of later tile units are not published yet.
#   NEON: 4 x 4 x 2; FP16 twice, SDOT four times; BFMMLA is 32 FLOP and SMMLA 64 per 128 bit. SVE: 2 x 512 bit (A64FX;
#   others are narrower). SME: one outer product of 512-bit vectors per cycle, 2 x 16 x 16 (Apple M4); FP16 and BF16
#   twice, INT8 four times that.
_CPU_FLOP_PER_CYCLE = (
    ("avx2", "f32", 32),
    ("avx2", "i8", 128),
    ("avx512f", "f32", 64),
    ("avx512f", "i8", 256),
    ("avx512_bf16", "bf16", 128),
    ("avx512_fp16", "f16", 128),
    ("avx_vnni", "i8", 128),
    ("avx512_vnni", "i8", 256),
    ("amx_bf16", "bf16", 2048),
    ("amx_fp16", "f16", 2048),
    ("amx_tf32", "tf32", 1024),
    ("amx_int8", "i8", 4096),
    ("amx_fp8", "f8e4m3", 4096),
    ("asimd", "f32", 32),
    ("asimd", "i8", 128),
    ("asimdhp", "f16", 64),
    ("bf16", "bf16", 128),
    ("i8mm", "i8", 256),
    ("sve", "f32", 64),
    ("sve", "f16", 128),
    ("sve", "bf16", 256),
    ("sve", "i8", 512),
    ("sme", "f32", 512),
    ("sme", "f16", 1024),
    ("sme", "bf16", 1024),
    ("sme", "i8", 2048),
)

# Bytes that a core can load and store per cycle: two 64-byte loads and one 64-byte store (Intel since Skylake-SP, AMD
# since Zen 5 by their optimization manuals; others have less). Every compulsory byte passes there, cached or not.
PORT_BYTES_PER_CYCLE = 3 * 64

# Memory bandwidth of one socket: above the fastest CPU sockets sold (Intel Xeon Max 9480, HBM2e: 1.64 TB/s by its
# datasheet; AMD EPYC 9V64H: 6.7 TB/s for four sockets).
SOCKET_BYTES_PER_S = 2e12

# FLOP per cycle and SM, dense, by the H100 whitepaper's peak rates over its SMs and clock: 989.4e12 / (132 x 1.83e9) =
# 4096 for bf16. FP32 lanes per SM: 128. Level-2 cache 50 MiB; 256 KiB of registers and 256 KiB of L1 per SM.
_GPU_FLOP_PER_CYCLE: dict[str, dict[str, float]] = {
    "sm_90": {"f32": 256, "tf32": 2048, "f16": 4096, "bf16": 4096, "f8e4m3": 8192, "i8": 8192},
}
_GPU_LANES_PER_SM = 128
_GPU_CACHE_BYTES = {"sm_90": (50 << 20, 512 << 10)}


@dataclass(frozen=True)
class PhysicalLimits:
    """What a device cannot beat: bounds from its construction, generous on purpose, never measured.

    A time under ``least_seconds`` shows that the work was not done. A time above it shows nothing: measured ceilings
    are far lower.

    Attributes:
        flop_per_s: highest rate by dtype; a dtype that is missing has no known bound.
        port_bytes_per_s: bytes per second that the cores can load and store; None where unknown.
        memory_bytes_per_s: bytes per second that memory can move; None where unknown.
        cache_bytes: what all caches hold together, and so need not move; None where unknown.
    """

    flop_per_s: dict[str, float] = field(default_factory=dict)
    port_bytes_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    cache_bytes: int | None = None

    def least_seconds(self, case: Case) -> float:
        """Seconds that one call of ``case`` takes at the very least; 0 where no bound is known."""
        rate = self.flop_per_s.get(case.compute_dtype, math.inf)
        least = LEAST_SHARE_OF_FLOPS * case.flops() / rate
        moved = case.compulsory_bytes()
        if self.port_bytes_per_s is not None:
            least = max(least, moved / self.port_bytes_per_s)
        # A ceiling goes over its buffer many times, in cache where it fits: its bytes say nothing about memory.
        if self.memory_bytes_per_s is not None and self.cache_bytes is not None and not isinstance(case, Ceiling):
            least = max(least, (moved - self.cache_bytes) / self.memory_bytes_per_s)
        return least


def physical_limits(device: Device) -> PhysicalLimits:
    """The physical limits of a device of this machine."""
    if device.kind == "cpu":
        return cpu_limits(cpu())
    return gpu_limits(gpus()[0])


def cpu_limits(cpu: Cpu) -> PhysicalLimits:
    """The physical limits of a CPU.

    A hypervisor may show hyperthreads as cores, two cores as one's hyperthreads, and caches of any size: there every
    thread counts as a core, and no bound rests on caches.
    """
    clock = cpu.boost_hz or CLOCK_HZ
    cores = cpu.threads if cpu.hypervisor else cpu.cores
    per_cycle: dict[str, float] = {}
    for feature, dtype, flop in _CPU_FLOP_PER_CYCLE:
        if feature in cpu.features:
            per_cycle[dtype] = max(per_cycle.get(dtype, 0), flop)
    trusted = not cpu.hypervisor and cpu.caches
    return PhysicalLimits(
        {dtype: cores * clock * flop for dtype, flop in _with_detours(per_cycle).items()},
        cores * clock * PORT_BYTES_PER_CYCLE,
        cpu.sockets * SOCKET_BYTES_PER_S if trusted else None,
        sum(c.bytes * c.instances for c in cpu.caches) if trusted else None,
    )


def gpu_limits(gpu: Gpu) -> PhysicalLimits:
    """The physical limits of a GPU; bounds on arithmetic and caches only for architectures whose figures are known."""
    per_cycle = _GPU_FLOP_PER_CYCLE.get(gpu.arch)
    if per_cycle is None:
        return PhysicalLimits()
    sms = gpu.cuda_cores // _GPU_LANES_PER_SM
    shared, per_sm = _GPU_CACHE_BYTES[gpu.arch]
    return PhysicalLimits(
        {dtype: sms * gpu.max_clock_hz * flop for dtype, flop in _with_detours(per_cycle).items()},
        None,
        gpu.memory_bytes_per_s,
        shared + sms * per_sm,
    )


def _with_detours(native: dict[str, float]) -> dict[str, float]:
    """FLOP per cycle of every dtype, where another dtype's units may serve it and still meet its tolerance.

    A narrower dtype runs on wider units by conversion. A wider one runs as a sum of products of parts: f32, tf32 and
    f16 as three of bf16 (Henry, Tang, Heinecke, ARITH 2019), f32 as three of tf32.
    """
    if not native:
        return {}
    rate = {d: native.get(d, 0.0) for d in ("f32", "tf32", "f16", "bf16", "f8e4m3", "i8")}
    f32 = max(rate["f32"], rate["tf32"] / 3, rate["bf16"] / 3)
    tf32 = max(f32, rate["tf32"])
    f16 = max(tf32, rate["f16"])
    bf16 = max(tf32, rate["bf16"])
    f8 = max(f16, bf16, rate["f8e4m3"])
    return {"f32": f32, "tf32": tf32, "f16": f16, "bf16": bf16, "f8e4m3": f8, "i8": max(f16, bf16, rate["i8"])}


# --- which ceilings to measure here ---------------------------------------------------------------------------------


def ceiling_cases(device: Device, dtypes: Iterable[str]) -> tuple[Ceiling, ...]:
    """The ceilings that cases of these dtypes are held against on this device.

    Rates per dtype, exponentials, the launch floor, and read and copy bandwidth: of every memory level on a CPU, of
    single cold passes by size on a GPU.
    """
    if device.kind == "cpu":
        labels = {(1, "data"): "L1d", (1, "unified"): "L1d", (2, "unified"): "L2", (3, "unified"): "L3"}
        caches = {labels[c.level, c.kind]: c.bytes * c.instances for c in cpu().caches if (c.level, c.kind) in labels}
        return tuple(cpu_ceiling_cases(caches, device.threads, dtypes))
    return tuple(gpu_ceiling_cases(dtypes))
