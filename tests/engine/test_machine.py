"""The machine is described from fixtures: listings of lscpu and trees like sysfs that machines of other kinds show."""

import json
import os
import sys
from types import SimpleNamespace

import pytest

from benchmarks.engine import machine
from benchmarks.engine.machine import Cache, Cpu, Gpu, PhysicalLimits
from impls.contract import Device
from impls.workloads.base import Case, parse_case
from impls.workloads.ceiling import Ceiling

GHZ = 1e9


def listing(**fields):
    """What ``lscpu --json`` prints, in its nested form (util-linux 2.38 and later with --hierarchic)."""
    entries = [{"field": f"{name.replace('_', ' ')}:", "data": value} for name, value in fields.items()]
    return json.dumps({"lscpu": [{"field": "Architecture:", "data": "x86_64", "children": entries}]})


def sysfs(folder, cpus):
    """A tree like /sys/devices/system/cpu: ``cpus`` maps a number to {relative path: text}."""
    for number, files in cpus.items():
        for path, text in files.items():
            file = folder / f"cpu{number}" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
    return folder


def cache_files(index, level, kind, size, shared):
    folder = f"cache/index{index}"
    return {
        f"{folder}/level": str(level),
        f"{folder}/type": kind,
        f"{folder}/size": size,
        f"{folder}/shared_cpu_list": shared,
    }


def two_cores_of_two_threads(folder):
    """CPUs 0 and 2 are one core's hyperthreads, 1 and 3 the other's; one L3."""
    cpus = {}
    for number in range(4):
        siblings = f"{number % 2},{number % 2 + 2}"
        cpus[number] = {
            "topology/thread_siblings_list": siblings,
            "topology/physical_package_id": "0",
            "cpufreq/scaling_driver": "intel_pstate",
            "cpufreq/cpuinfo_max_freq": str(3_800_000 + 100_000 * (number % 2)),
            **cache_files(0, 1, "Data", "48K", siblings),
            **cache_files(1, 1, "Instruction", "32K", siblings),
            **cache_files(2, 2, "Unified", "2048K", siblings),
            **cache_files(3, 3, "Unified", "105M", "0-3"),
        }
    return sysfs(folder, cpus)


SAPPHIRE_RAPIDS = listing(
    Model_name="Intel(R) Xeon(R) Platinum 8480+",
    Vendor_ID="GenuineIntel",
    CPU_family="6",
    Model="143",
    Flags="fpu avx2 fma avx512f avx512_bf16 avx512_vnni amx_tile amx_bf16 amx_int8",
)


def test_bare_metal(tmp_path):
    cpu = machine.read_cpu(SAPPHIRE_RAPIDS, range(4), two_cores_of_two_threads(tmp_path))
    assert (cpu.name, cpu.microarchitecture) == ("Intel(R) Xeon(R) Platinum 8480+", "sapphire-rapids")
    assert (cpu.threads, cpu.cores, cpu.sockets, cpu.hypervisor) == (4, 2, 1, None)
    assert cpu.features >= {"amx_bf16", "avx512f"}
    assert "fpu" not in cpu.features
    assert cpu.boost_hz == 3.9 * GHZ
    assert cpu.caches == (
        Cache(1, "data", 48 << 10, 2, 2),
        Cache(2, "unified", 2 << 20, 2, 2),
        Cache(3, "unified", 105 << 20, 4, 1),
    )


def test_affinity_narrows_everything(tmp_path):
    cpu = machine.read_cpu(SAPPHIRE_RAPIDS, {0}, two_cores_of_two_threads(tmp_path))
    assert (cpu.threads, cpu.cores) == (1, 1)
    assert cpu.caches[0] == Cache(1, "data", 48 << 10, 1, 1)
    assert cpu.boost_hz == 3.8 * GHZ


def test_virtual_machine_that_hides_clock_and_topology(tmp_path):
    text = listing(
        Model_name="AMD EPYC",
        Vendor_ID="AuthenticAMD",
        CPU_family="25",
        Model="17",
        Flags="hypervisor avx2 avx512f",
        Hypervisor_vendor="KVM",
    )
    cpu = machine.read_cpu(text, range(2), tmp_path)
    assert (cpu.microarchitecture, cpu.hypervisor, cpu.boost_hz) == ("genoa", "KVM", None)
    assert (cpu.threads, cpu.cores, cpu.sockets, cpu.caches) == (2, 2, 1, ())


def test_desktop_part_with_a_servers_model_number_gets_no_servers_name(tmp_path):
    text = listing(
        Model_name="AMD Ryzen Threadripper PRO 7995WX", Vendor_ID="AuthenticAMD", CPU_family="25", Model="24"
    )
    assert machine.read_cpu(text, {0}, tmp_path).microarchitecture is None


def test_clock_without_boost_is_not_believed(tmp_path):
    tree = sysfs(tmp_path, {0: {"cpufreq/scaling_driver": "acpi-cpufreq", "cpufreq/cpuinfo_max_freq": "2600000"}})
    assert machine.read_cpu(SAPPHIRE_RAPIDS, {0}, tree).boost_hz is None


def test_no_lscpu_claims_nothing(tmp_path):
    cpu = machine.read_cpu("", {0}, tmp_path)
    assert cpu.features == frozenset()
    assert machine.cpu_limits(cpu).flop_per_s == {}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no affinity")
def test_this_machine():
    cpu = machine.cpu()
    assert cpu.threads == len(os.sched_getaffinity(0))
    assert 1 <= cpu.sockets <= cpu.cores <= cpu.threads
    described = machine.describe()
    assert json.loads(json.dumps(described)) == described
    assert {"name", "cpu", "arch", "cores", "threads", "memory_bytes", "caches", "os", "kernel"} <= set(described)
    device = machine.device("cpu")
    assert (device.kind, device.threads, device.features) == ("cpu", cpu.threads, cpu.features)
    assert 0 < device.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/user/job\n", {"user/memory.max": "max", "user/job/memory.max": "1048576"}),
        ("0::/user/job\n", {"user/memory.max": "1048576", "user/job/memory.max": "max"}),
        ("4:memory:/user/job\n0::/\n", {"memory/user/job/memory.limit_in_bytes": "1048576"}),
        ("4:cpu,memory:/user/job\n", {"memory/memory.limit_in_bytes": "1048576"}),
    ],
    ids=["v2", "v2 parent", "v1", "v1 container root"],
)
def test_memory_is_what_the_control_groups_leave(tmp_path, groups, files):
    for path, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{p}": t for p, t in files.items()}}.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert machine.memory_bytes(tmp_path) == 1 << 20


# --- the name


def named(monkeypatch, cpu, gpus=()):
    monkeypatch.delenv("RIDGEMARK_MACHINE", raising=False)
    monkeypatch.setattr(machine, "cpu", lambda: cpu)
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    return machine.name()


H200 = Gpu("NVIDIA H200", "sm_90", 141 << 30, "580.95", 132 * 128, 1.98 * GHZ, 4.9e12, 700.0)


@pytest.mark.parametrize(
    ("brand", "microarchitecture", "cores", "gpus", "name"),
    [
        ("AMD EPYC", "genoa", 2, (), "amd-epyc-genoa-2c"),
        ("AMD EPYC 9654 96-Core Processor", "genoa", 96, (), "amd-epyc-9654-genoa-96c"),
        (
            "Intel(R) Xeon(R) Platinum 8480+",
            "sapphire-rapids",
            16,
            (H200,),
            "intel-xeon-platinum-8480-sapphire-rapids-16c-h200",
        ),
        ("Intel(R) Core(TM) i7-8700K CPU @ 3.70GHz", None, 6, (), "intel-core-i7-8700k-6c"),
        ("AMD Ryzen 9 7950X 16-Core Processor", None, 16, (), "amd-ryzen-9-7950x-16c"),
        ("Neoverse-V2", None, 72, (), "neoverse-v2-72c"),
    ],
)
def test_name(monkeypatch, brand, microarchitecture, cores, gpus, name):
    cpu = Cpu(brand, microarchitecture, "x86_64", frozenset(), cores, cores, 1)
    assert named(monkeypatch, cpu, gpus) == name


def test_name_given_by_the_user(monkeypatch):
    monkeypatch.setenv("RIDGEMARK_MACHINE", "Lab node/7")
    assert machine.name() == "lab-node-7"


# --- GPUs through NVML


class FakeNvml(SimpleNamespace):
    """nvidia-ml-py's functions for H200s, with the units of NVML's reference: bytes, MHz, bits, mW."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    class NVMLError(Exception):
        pass

    def __init__(self, count):
        def by_index(i):
            if i >= count:
                raise self.NVMLError("not found")
            return i

        def by_uuid(uuid):
            return by_index(int(uuid.removeprefix(b"GPU-")) if uuid.startswith(b"GPU-") else count)

        super().__init__(
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlSystemGetDriverVersion=lambda: b"580.95",
            nvmlDeviceGetCount=lambda: count,
            nvmlDeviceGetHandleByIndex=by_index,
            nvmlDeviceGetHandleByUUID=by_uuid,
            nvmlDeviceGetName=lambda h: f"NVIDIA H200 {h}",
            nvmlDeviceGetCudaComputeCapability=lambda h: (9, 0),
            nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(total=150 * 10**9),
            nvmlDeviceGetNumGpuCores=lambda h: 132 * 128,
            nvmlDeviceGetMaxClockInfo=lambda h, clock: {1: 1980, 2: 3201}[clock],
            nvmlDeviceGetMemoryBusWidth=lambda h: 6016,
            nvmlDeviceGetEnforcedPowerLimit=lambda h: 700_000,
        )


@pytest.fixture
def nvml(monkeypatch):
    def install(count):
        machine.gpus.cache_clear()
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(count))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("RIDGEMARK_DEVICE", raising=False)

    yield install
    machine.gpus.cache_clear()


def test_gpu_is_described(nvml):
    nvml(1)
    (gpu,) = machine.gpus()
    assert (gpu.arch, gpu.driver, gpu.power_limit_w) == ("sm_90", "580.95", 700.0)
    # As an H200 answers: 3201 MHz, two transfers per clock, 6016 bit. The datasheet says 4.8 TB/s.
    assert gpu.memory_bytes_per_s == pytest.approx(4.8e12, rel=0.005)
    assert machine.default_device() == Device("cuda", "NVIDIA H200 0", "sm_90", machine.cpu().threads, 150 * 10**9)
    assert machine.describe()["gpu"][0]["name"] == "NVIDIA H200 0"


@pytest.mark.parametrize(
    ("visible", "names"),
    [("1", ["1"]), ("2,0", ["2", "0"]), ("GPU-1", ["1"]), ("0,7,1", ["0"]), ("", []), ("-1", [])],
)
def test_visible_devices_are_honoured(nvml, monkeypatch, visible, names):
    nvml(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [g.name.removeprefix("NVIDIA H200 ") for g in machine.gpus()] == names


def test_device_that_is_not_there_is_refused(nvml, monkeypatch):
    nvml(0)
    assert machine.default_device().kind == "cpu"
    monkeypatch.setenv("RIDGEMARK_DEVICE", "cuda")
    with pytest.raises(machine.NoDevice, match="No NVIDIA GPU"):
        machine.default_device()
    monkeypatch.setenv("RIDGEMARK_DEVICE", "tpu")
    with pytest.raises(machine.NoDevice, match="Write cpu or cuda"):
        machine.default_device()


def test_gpu_machine_can_be_told_to_use_its_cpu(nvml, monkeypatch):
    nvml(1)
    monkeypatch.setenv("RIDGEMARK_DEVICE", "cpu")
    assert machine.default_device().kind == "cpu"


# --- physical limits


class Work(Case):
    """Just work: FLOPs and bytes."""

    def __init__(self, flops=0, bytes=0, dtype="f32"):
        self._flops, self._bytes, self._dtype = flops, bytes, dtype

    id = "work"
    compute_dtype = property(lambda self: self._dtype)
    flops = lambda self: self._flops  # noqa: E731
    compulsory_bytes = lambda self: self._bytes  # noqa: E731
    parse = input_specs = output_specs = inputs = reference_flops = expected = None


def limits_of(features, **changes):
    cpu = {"boost_hz": 2 * GHZ, "caches": (Cache(3, "unified", 32 << 20, 4, 2),)} | changes
    return machine.cpu_limits(Cpu("CPU", None, "x86_64", frozenset(features.split()), 8, 4, 1, **cpu))


@pytest.mark.parametrize(
    ("features", "dtype", "flop_per_cycle"),
    [
        ("avx2", "f32", 32),
        ("avx2", "bf16", 32),
        ("avx2", "i8", 128),
        ("avx2 avx512f", "f32", 64),
        ("avx2 avx512f avx512_bf16 avx512_vnni", "f32", 64),
        ("avx2 avx512f avx512_bf16 avx512_vnni", "bf16", 128),
        ("avx2 avx512f avx512_bf16 avx512_vnni", "i8", 256),
        ("avx512f avx512_fp16", "f16", 128),
        ("avx512f amx_bf16 amx_int8", "bf16", 2048),
        ("avx512f amx_bf16 amx_int8", "i8", 4096),
        # Three products of bf16 parts make one of f32: AMX is faster at that than the vector units at one.
        ("avx512f amx_bf16 amx_int8", "f32", 2048 / 3),
        ("avx512f avx512_bf16", "f32", 64),
        ("asimd", "f32", 32),
        ("asimd sve bf16", "bf16", 256),
    ],
)
def test_cpu_rates(features, dtype, flop_per_cycle):
    assert limits_of(features).flop_per_s[dtype] == pytest.approx(4 * 2 * GHZ * flop_per_cycle)


def test_least_time_of_arithmetic():
    # 4 cores at 2 GHz with AVX-512 do 512 GFLOP/s; (7/8)^2 of the nominal count must be done.
    assert limits_of("avx512f").least_seconds(Work(flops=512 * 10**9)) == pytest.approx(49 / 64)


def test_least_time_of_moving_bytes():
    limits = limits_of("avx512f")
    # Through the ports: 192 bytes per cycle, 4 cores, 2 GHz = 1.536 TB/s.
    assert limits.least_seconds(Work(bytes=48 << 20)) == pytest.approx((48 << 20) / 1.536e12)
    # From memory: 64 MiB may lie in the caches, the rest comes at 2 TB/s at most.
    fast = PhysicalLimits(port_bytes_per_s=1e15, memory_bytes_per_s=2e12, cache_bytes=64 << 20)
    assert fast.least_seconds(Work(bytes=2 * 10**12 + (64 << 20))) == pytest.approx(1.0)
    assert fast.least_seconds(Work(bytes=64 << 20)) < 1e-6


def test_virtual_machines_caches_and_siblings_are_not_believed():
    limits = limits_of("avx512f", hypervisor="KVM", boost_hz=None)
    assert limits.memory_bytes_per_s is None
    assert limits.flop_per_s["f32"] == pytest.approx(8 * 6.5 * GHZ * 64)


def test_unknown_devices_have_no_bound():
    assert limits_of("").flop_per_s == {}
    unknown = machine.gpu_limits(Gpu("New", "sm_999", 1, "", 128, 1e9, 1e12, 1.0))
    assert unknown.least_seconds(Work(flops=10**18, bytes=10**15)) == 0.0


def test_h200_rates_are_the_datasheets_at_its_clock():
    at_datasheet_clock = Gpu("NVIDIA H200", "sm_90", 1, "", 132 * 128, 1.83 * GHZ, 4.8e12, 700.0)
    limits = machine.gpu_limits(at_datasheet_clock)
    # NVIDIA's H200 datasheet, dense: bf16 989, fp8 and int8 1979, tf32 495 TFLOP/s.
    for dtype, tflops in {"bf16": 989, "f16": 989, "f8e4m3": 1979, "i8": 1979, "tf32": 495}.items():
        assert limits.flop_per_s[dtype] == pytest.approx(tflops * 1e12, rel=0.001)
    # Best times known on an H200 are not impossible: 8192^3 in bf16 at 824 TFLOP/s, a read of 2 GB at 4.3 TB/s.
    best = machine.gpu_limits(H200)
    assert best.least_seconds(parse_case("gemm:8192x8192x8192:bf16")) < 2 * 8192**3 / 824e12
    assert best.least_seconds(Work(bytes=2 * 10**9)) < 2e9 / 4.3e12


@pytest.mark.parametrize(
    ("features", "case", "seconds"),
    [
        # Measured elsewhere with well-tuned libraries on 2 cores with AMX: 1569 GFLOP/s bf16 and 427 f32 at 1024^3.
        ("avx512f amx_bf16", "gemm:1024x1024x1024:bf16", 2 * 1024**3 / 1569e9),
        ("avx512f amx_bf16", "gemm:1024x1024x1024:f32", 2 * 1024**3 / 427e9),
    ],
)
def test_measured_times_are_possible(features, case, seconds):
    cpu = Cpu("CPU", None, "x86_64", frozenset(features.split()), 2, 2, 1, hypervisor="KVM")
    assert machine.cpu_limits(cpu).least_seconds(parse_case(case)) < seconds


# --- ceilings


def test_ceilings_cover_every_memory_level(monkeypatch):
    caches = (Cache(1, "data", 32 << 10, 1, 2), Cache(2, "unified", 1 << 20, 1, 2), Cache(3, "unified", 32 << 20, 2, 1))
    monkeypatch.setattr(machine, "cpu", lambda: Cpu("CPU", None, "x86_64", frozenset(), 2, 2, 1, caches))
    device = Device("cpu", "CPU", "x86_64", 2, 24 << 30)
    cases = machine.ceiling_cases(device, ["bf16", "i32"])
    assert [(c.probe, c.dtype) for c in cases if c.probe not in ("read", "copy")] == [
        ("launch", "i32"),
        ("exp", "f32"),
        ("rate", "bf16"),
    ]
    # Half of each level over both cores: 32 KiB, 1 MiB, 16 MiB; memory: 4 x 32 MiB, but not under 256 MiB.
    assert [c.bytes for c in cases if c.probe == "read"] == [32 << 10, 1 << 20, 16 << 20, 256 << 20]
    assert [2 * c.bytes for c in cases if c.probe == "copy"] == [c.bytes for c in cases if c.probe == "read"]
    assert all(parse_case(c.id) == c for c in cases)


def test_ceilings_where_caches_are_hidden(monkeypatch):
    monkeypatch.setattr(machine, "cpu", lambda: Cpu("CPU", None, "x86_64", frozenset(), 2, 2, 1))
    cases = machine.ceiling_cases(Device("cpu", "CPU", "x86_64", 2, 24 << 30), ["f32"])
    assert [c.bytes for c in cases if c.probe == "read"] == [256 << 20]


def test_ceilings_are_not_impossible():
    # A ceiling rereads its buffer, so that its bytes may come from cache: only the ports bound it.
    limits = PhysicalLimits(port_bytes_per_s=1e12, memory_bytes_per_s=1e9, cache_bytes=0)
    case = Ceiling("read", bytes=1 << 20)
    assert limits.least_seconds(case) == pytest.approx(case.compulsory_bytes() / 1e12)
