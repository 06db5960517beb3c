"""What timing on an NVIDIA GPU needs beside the clock: a cold L2, a gate, full clocks, readings of clock and power.

Owns a few small kernels, built at run time by NVRTC in the primary context that the stacks share, and the readings of
NVML. It does not own the times (cupti). cuda-bindings and nvidia-ml-py only: it runs in every GPU stack's environment.

The gate is a kernel that fills every thread slot of every multiprocessor and waits for the host: whatever is launched
meanwhile, on whatever stream, queues up behind it and starts when it opens. What a call costs its host then does not
show as gaps between its kernels, as with the blocking kernel of nvbench; that one waits in the measured program's own
stream, which a program that keeps its stream to itself (XLA) does not tell. Copies and memsets that need no
multiprocessor do not wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

# A buffer read before each call so that L2 holds nothing of the call's: several times the largest L2 sold so far
# (50 MiB on an H100 or H200, 126 MB on a B200). It is only read: dirty lines would be written back during the call.
FLUSH_BYTES = 512 * 2**20
# The clock has ramped up when two readings in a row agree this well, and give up after so many milliseconds.
_RAMP_AGREE, _RAMP_MS = 0.005, 400
_SPIN_US = 2000
# Threads per block of the gate: it divides the thread slots of every multiprocessor so far (2048 or 1536).
_GATE_THREADS = 512
# A gate that the host never opens, because the program waits for its own work, opens by itself.
_GATE_LIMIT_NS = 20_000_000

SOURCE = r"""
extern "C" __global__ void ridgemark_read(const uint4 *data, unsigned long long n, unsigned int *sink) {
    unsigned int sum = 0;
    unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        uint4 v = data[i];
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x9e3779b9u) *sink = sum;  // never so by design, but the compiler cannot know
}

// Per multiprocessor: its cycle counter and the global nanosecond timer, read together.
extern "C" __global__ void ridgemark_stamp(unsigned long long *stamps) {
    unsigned int sm;
    unsigned long long cycles, ns;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles));
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    if (threadIdx.x == 0) { stamps[2 * sm] = cycles; stamps[2 * sm + 1] = ns; }
}

extern "C" __global__ void ridgemark_spin(unsigned long long ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - begin < ns);
}

extern "C" __global__ void ridgemark_clear(unsigned long long *state) { state[0] = state[1] = 0; }

// door (host memory): 0 opened by the host, 1 every block is in its place, 2 opened by itself.
// state (device memory, zeroed before): 0 blocks in their place, 1 the global time at which all leave together.
extern "C" __global__ void __launch_bounds__(512) ridgemark_gate(
    volatile unsigned int *door, volatile unsigned long long *state, unsigned long long limit_ns,
    unsigned long long *stamps) {
    if (threadIdx.x == 0) {
        unsigned long long begin, now, leave;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
        if (atomicAdd((unsigned long long *)state, 1ull) == gridDim.x - 1) { door[1] = 1; __threadfence_system(); }
        if (blockIdx.x == 0) {
            do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (!door[0] && now - begin < limit_ns);
            if (!door[0]) door[2] = 1;
            state[1] = now + 5000;  // long enough for every block to have read it
            __threadfence_system();
        }
        do { leave = state[1]; } while (leave == 0);
        do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now < leave);
        unsigned int sm;
        unsigned long long cycles, ns;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles));
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
        stamps[2 * sm] = cycles;
        stamps[2 * sm + 1] = ns;
    }
    __syncthreads();
}
"""
#: Names of the harness's own kernels begin so: they are never counted to a call.
OWN_PREFIX = "ridgemark_"
#: The gate's name among the activity: a call's time begins where it opens.
GATE = OWN_PREFIX + "gate"


class CudaError(RuntimeError):
    """A CUDA call failed; the message names it and its error."""


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a cuda-bindings call.

    Raises:
        CudaError: the call did not succeed.
    """
    status, *values = result
    if int(status) != 0:
        raise CudaError(f"CUDA says {status.name if hasattr(status, 'name') else status}.")
    return values[0] if len(values) == 1 else (tuple(values) or None)


@dataclass(frozen=True)
class Reading:
    """What NVML says at one moment: SM clock in MHz, power in W, temperature in degrees C, the clock event reasons."""

    clock_mhz: float
    power_w: float
    temperature_c: float
    reasons: int


@dataclass
class Gate:
    """Whether the gate was still closed when it was opened: a program that waits for its own work finds it open."""

    held: bool = True


class Residency:
    """Growth of the device memory in use while one program loads inputs and is called; see ``operations.Residency``.

    Read after each operation. Allocators keep what they reached, so that this is the peak as their user sees it; what
    they had kept before from other programs is not in it. No other worker works meanwhile.

    Attributes:
        peak_bytes: the largest growth so far.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = 0
        self._held = 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Around an operation of the program."""
        device = gpu()
        before = device.used_bytes()
        yield
        self._held += device.used_bytes() - before
        self.peak_bytes = max(self.peak_bytes or 0, self._held)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Around what happens within such an operation and is not the program's."""
        device = gpu()
        before = device.used_bytes()
        yield
        self._held -= device.used_bytes() - before


class Gpu:
    """The first visible GPU, through the primary context of this process."""

    def __init__(self) -> None:
        from cuda.bindings import driver, nvrtc

        self._driver = driver
        checked(driver.cuInit(0))
        self._device = checked(driver.cuDeviceGet(0))
        self._context = checked(driver.cuDevicePrimaryCtxRetain(self._device))
        checked(driver.cuCtxSetCurrent(self._context))
        attribute = driver.CUdevice_attribute
        major, minor, self.sms, self.l2_bytes, slots = (
            checked(driver.cuDeviceGetAttribute(a, self._device))
            for a in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
                attribute.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
            )
        )
        program = checked(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"ridgemark.cu", 0, [], []))
        checked(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
        cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
        checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        module = checked(driver.cuModuleLoadData(np.frombuffer(cubin, np.uint8).ctypes.data))
        self._kernels = {
            name: checked(driver.cuModuleGetFunction(module, f"{OWN_PREFIX}{name}".encode()))
            for name in ("read", "stamp", "spin", "clear", "gate")
        }
        self._flush = checked(driver.cuMemAlloc(FLUSH_BYTES))
        checked(driver.cuMemsetD8(self._flush, 1, FLUSH_BYTES))
        self._sink = checked(driver.cuMemAlloc(16))
        stamps = checked(driver.cuMemAlloc(2 * 16 * self.sms))
        self._stamps = [int(stamps), int(stamps) + 16 * self.sms]
        self._settled_mhz = 0.0
        self._gate_blocks = self.sms * (slots // _GATE_THREADS)
        self._gate_state = checked(driver.cuMemAlloc(16))
        self._gate_door = checked(driver.cuMemHostAlloc(16, driver.CU_MEMHOSTALLOC_DEVICEMAP))
        self._door = (ctypes.c_uint32 * 4).from_address(int(self._gate_door))
        # Waits for no other stream, and none waits for it: what queues up behind the gate does so for lack of room.
        flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._gate_stream = checked(driver.cuStreamCreate(int(flag)))
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the device is idle, whatever the stream."""
        checked(self._driver.cuCtxSetCurrent(self._context))
        checked(self._driver.cuCtxSynchronize())

    def flush_l2(self) -> None:
        """Leave nothing in L2 but clean lines of a buffer that no call reads."""
        self._launch("read", 8 * self.sms, 256, (self._flush, 8), (FLUSH_BYTES // 16, 8), (self._sink, 8))

    @contextlib.contextmanager
    def gated(self) -> Iterator[Gate]:
        """Launches inside the ``with`` block queue up; they start together when it ends. Reads the clock as it opens.

        The device must be idle before.
        """
        door = self._door
        door[0] = door[1] = door[2] = 0
        self._launch("clear", 1, 1, (self._gate_state, 8), stream=self._gate_stream)
        arguments = ((self._gate_door, 8), (self._gate_state, 8), (_GATE_LIMIT_NS, 8), (self._stamps[0], 8))
        self._launch("gate", self._gate_blocks, _GATE_THREADS, *arguments, stream=self._gate_stream)
        until = time.monotonic() + 2 * _GATE_LIMIT_NS / 1e9
        while not door[1] and time.monotonic() < until:
            pass
        gate = Gate()
        try:
            yield gate
        finally:
            gate.held = not door[2]
            door[0] = 1

    def stamp(self, which: int) -> None:
        """Read the cycle counter and the nanosecond timer of every multiprocessor: before (0), after (1)."""
        self._launch("stamp", 4 * self.sms, 32, (self._stamps[which], 8))

    def stamps(self) -> np.ndarray:
        """The two stamps, (2, multiprocessors, 2): cycles and ns."""
        host = np.empty((2, self.sms, 2), np.uint64)
        checked(self._driver.cuMemcpyDtoH(host.ctypes.data, self._stamps[0], host.nbytes))
        return host

    def ramp_up(self) -> float:
        """Keep the multiprocessors busy until the clock has settled; an idle GPU sits at a fraction of it.

        Settled is where two readings in a row agree, or one agrees with what it settled at before.

        Returns:
            The settled SM clock, MHz.
        """
        begin = time.monotonic()
        while True:
            self.stamp(0)
            self._launch("spin", self.sms, 32, (_SPIN_US * 1000, 8))
            self.stamp(1)
            self.synchronize()
            now, last = clock_mhz(self.stamps()), self._settled_mhz
            self._settled_mhz = now
            if abs(now - last) <= _RAMP_AGREE * now or (time.monotonic() - begin) * 1e3 > _RAMP_MS:
                return now

    def used_bytes(self) -> int:
        """Device memory in use, by all processes."""
        free, total = checked(self._driver.cuMemGetInfo())
        return int(total) - int(free)

    def _launch(self, name: str, grid: int, block: int, *arguments: tuple[Any, int], stream: Any = 0) -> None:
        values = [ctypes.c_uint64(int(value)) for value, _ in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        checked(
            self._driver.cuLaunchKernel(
                self._kernels[name], grid, 1, 1, block, 1, 1, 0, stream, ctypes.addressof(pointers), 0
            )
        )


def clock_mhz(stamps: np.ndarray) -> float:
    """SM clock between two stamps, MHz: median over multiprocessors."""
    before, after = stamps.astype(np.int64)
    cycles, ns = (after - before).astype(np.float64).T
    return float(np.median(cycles / ns)) * 1e3


@cache
def gpu() -> Gpu:
    """The GPU, made on first use: after the stack has made the primary context."""
    return Gpu()


@cache
def _nvml() -> tuple[Any, Any]:
    import pynvml

    pynvml.nvmlInit()
    from cuda.bindings import driver

    device = checked(driver.cuDeviceGet(0))
    bus = checked(driver.cuDeviceGetPCIBusId(64, device)).split(b"\0")[0]
    return pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(bus)


def pin(array: np.ndarray) -> bool:
    """Let the device read and write a mapped array by itself, until ``unpin``.

    On an H200 134 MB then take 2.5 ms either way; 15 ms where the driver copies them through memory of its own.

    Returns:
        Whether it does: some systems allow no pages to be pinned, and copies are slower there.
    """
    from cuda.bindings import driver

    gpu()
    return array.nbytes > 0 and int(driver.cuMemHostRegister(array.ctypes.data, array.nbytes, 0)[0]) == 0


def unpin(array: np.ndarray) -> None:
    """Before a pinned array's memory goes."""
    from cuda.bindings import driver

    checked(driver.cuMemHostUnregister(array.ctypes.data))


def reading() -> Reading:
    """What NVML says now."""
    nvml, handle = _nvml()
    return Reading(
        float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
    )


def energy_j() -> float:
    """Energy since the driver was loaded, J."""
    nvml, handle = _nvml()
    return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3


def throttled(reasons: int) -> list[str]:
    """Names of the reasons that make a block worthless: heat, hardware slowdown. A power cap is how a GPU runs."""
    # nvml.h, nvmlClocksEventReasons.
    worthless = {
        "hardware slowdown": 0x8,
        "software thermal slowdown": 0x20,
        "hardware thermal slowdown": 0x40,
        "hardware power brake": 0x80,
    }
    return [name for name, bit in worthless.items() if reasons & bit]


def foreign_processes() -> list[int]:
    """Processes that compute on the GPU and are neither this one nor another worker of the same harness."""
    nvml, handle = _nvml()
    found = [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    return [pid for pid in found if pid != os.getpid() and _parent(pid) not in (os.getppid(), None)]


def _parent(pid: int) -> int | None:
    """The parent of a process; None where it is gone or not visible from here."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
