"""Programs on IREE's runtime: devices, buffers, calls.

Owns what every implementation of this stack does after compiling. Imports IREE inside its functions and methods only.

A call passes a ready list of buffers to the function and waits: IREE's Python wrapper around that adds nothing that is
wanted here. On the CPU inputs lie over the worker's arrays; outputs are IREE's own, new in every call.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from impls.contract import Device, Program, Unsupported
from impls.iree.targets import Compiled, Target
from impls.workloads.base import Case
from impls.workloads.dtypes import dtype

if TYPE_CHECKING:
    from iree import runtime

_STACK_BYTES = 1 << 22


@cache
def hal_device(driver: str, threads: int) -> runtime.HalDevice:
    """The process's device of an IREE driver; on a CPU ``threads`` workers, unpinned: the process has its affinity.

    Raises:
        Unsupported: the driver finds no device, or, for Vulkan, none that runs on the CPU.
    """
    from iree import runtime

    # Process-wide, read when the driver is made; a worker's thread count never changes. The default stack of 128 KiB is
    # too small for what unrolled attention spills: it ended in a segmentation fault.
    runtime.flags.parse_flags(f"--task_topology_group_count={threads}", f"--task_worker_stack_size={_STACK_BYTES}")
    os.environ["LP_NUM_THREADS"] = str(threads)  # Mesa's lavapipe
    try:
        found = runtime.get_driver(driver)
        devices = found.query_available_devices()
    except (RuntimeError, ValueError) as error:
        raise Unsupported(f"IREE's driver {driver} cannot be used: {_line(error)}.") from None
    if driver != "vulkan":
        return found.create_default_device()
    for device in devices:
        if "llvmpipe" in device["name"]:
            return found.create_device(device["device_id"], None)
    raise Unsupported(f"Vulkan finds {len(devices)} devices here, but not Mesa's lavapipe, which runs on the CPU.")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")


class Function:
    """The function ``main`` of a compiled module, on a device."""

    def __init__(self, compiled: Compiled, device: runtime.HalDevice, outputs: int) -> None:
        from iree import runtime

        self._list = runtime.VmVariantList
        self._view = runtime.HalBufferView
        self._outputs = outputs
        instance = _instance()
        module = runtime.VmModule.copy_buffer(instance, compiled.module)
        self._context = runtime.VmContext(instance, [runtime.create_hal_module(instance, device), module])
        self._function = module.lookup_function("main")

    def arguments(self, views: Sequence[runtime.HalBufferView]) -> runtime.VmVariantList:
        """The list of arguments that a call takes; it may be used again and again."""
        arguments = self._list(len(views))
        for view in views:
            arguments.push_ref(view)
        return arguments

    def call(self, arguments: runtime.VmVariantList) -> runtime.VmVariantList:
        """The function's results, complete."""
        results = self._list(self._outputs)
        self._context.invoke(self._function, arguments, results)
        return results

    def views(self, results: runtime.VmVariantList) -> list[runtime.HalBufferView]:
        """The results' buffers."""
        return [results.get_as_object(i, self._view) for i in range(self._outputs)]


@cache
def _instance() -> runtime.VmInstance:
    from iree import runtime

    return runtime.VmInstance()


class Memory:
    """A device's buffers, and their copies on the host."""

    def __init__(self, device: runtime.HalDevice, *, on_host: bool) -> None:
        from iree import runtime
        from iree.runtime.dtypes import map_dtype_to_hal_element_type

        self._rt = runtime
        self._element = map_dtype_to_hal_element_type
        self._device = device
        self._on_host = on_host

    def view(self, array: np.ndarray) -> runtime.HalBufferView:
        """A buffer over a page-aligned, contiguous array; on a device with its own memory, a copy of it."""
        rt, usage = self._rt, self._rt.BufferUsage.DEFAULT
        if self._on_host:
            kind = rt.MemoryType.HOST_LOCAL | rt.MemoryType.DEVICE_VISIBLE
            flat = array.reshape(-1).view(np.uint8)
            buffer = self._device.allocator.import_host_allocation(flat, memory_type=kind, allowed_usage=usage)
            return rt.HalBufferView(buffer, array.shape, self._element(array.dtype))
        return self._device.allocator.allocate_buffer_copy(
            rt.MemoryType.DEVICE_LOCAL, usage, self._device, array, self._element(array.dtype)
        )

    def read(self, view: runtime.HalBufferView, storage: np.dtype) -> np.ndarray:
        """The buffer's contents: over its memory where that is the host's, else a copy."""
        rt = self._rt
        if self._on_host:
            return view.map().asarray(view.shape, storage)
        source = view.get_buffer()
        staging = self._device.allocator.allocate_buffer(
            memory_type=rt.MemoryType.HOST_LOCAL | rt.MemoryType.DEVICE_VISIBLE,
            allowed_usage=rt.BufferUsage.TRANSFER | rt.BufferUsage.MAPPING,
            allocation_size=source.byte_length(),
        )
        done = self._device.create_semaphore(0)
        fence = rt.HalFence.create_at
        self._device.queue_copy(source, staging, wait_semaphores=fence(done, 0), signal_semaphores=fence(done, 1))
        fence(done, 1).wait()
        return staging.map().asarray(view.shape, storage).copy()


@dataclass
class Loaded:
    """One input set.

    Attributes:
        views: buffers of the case's inputs, by name.
        arguments: what a call is given: these, and a forward pass's residuals.
        residuals: keeps the residuals' buffers.
    """

    views: dict[str, runtime.HalBufferView]
    arguments: Any
    residuals: list[runtime.HalBufferView]


class IreeProgram(Program):
    """A compiled function of the case's inputs, in their order, and of what a forward pass keeps for it.

    Args:
        case: the case.
        device: where it runs.
        target: what ``compiled`` was compiled for.
        compiled: the timed function.
        forward: of the inputs but dO, its results are passed after the inputs; None where there is no such pass.
        forward_outputs: how many results ``forward`` has.
    """

    def __init__(
        self,
        case: Case,
        device: Device,
        target: Target,
        compiled: Compiled,
        *,
        forward: Compiled | None = None,
        forward_outputs: int = 0,
    ) -> None:
        super().__init__()
        self._specs = case.input_specs()
        self._outputs = case.output_specs()
        on_host = target.driver.startswith("local")
        hal = hal_device(target.driver, device.threads)
        self._memory = Memory(hal, on_host=on_host)
        self._function = Function(compiled, hal, len(self._outputs))
        self._forward = None if forward is None else Function(forward, hal, forward_outputs)
        self._call: Callable[[Any], Any] = self._function.call
        self._in_place = on_host and forward is None
        self.config = {"target": target.name, "driver": target.driver, "threads": device.threads, **compiled.statistics}

    def load(self, inputs: Mapping[str, np.ndarray]) -> Loaded:
        """Buffers of the inputs, and the residuals of a forward pass."""
        views = {name: self._memory.view(inputs[name]) for name in self._specs}
        residuals: list[runtime.HalBufferView] = []
        if self._forward is not None:
            given = [view for name, view in views.items() if name != "dO"]
            residuals = self._forward.views(self._forward.call(self._forward.arguments(given)))
        arguments = self._function.arguments([*views.values(), *residuals])
        return Loaded(views, arguments, residuals)

    def refill(self, loaded: Loaded, inputs: Mapping[str, np.ndarray]) -> Loaded:
        """Nothing to do where the buffers lie over the worker's arrays and no residual follows; else as ``load``."""
        return loaded if self._in_place else self.load(inputs)

    def run(self, loaded: Loaded) -> Any:
        """The results, complete."""
        return self._call(loaded.arguments)

    def read_outputs(self, result: Any) -> dict[str, np.ndarray]:
        """The case's outputs on the host."""
        views = zip(self._outputs.items(), self._function.views(result), strict=True)
        return {name: self._memory.read(view, dtype(spec.dtype).storage) for (name, spec), view in views}

    def read_inputs(self, loaded: Loaded) -> dict[str, np.ndarray]:
        """The inputs' buffers on the host."""
        return {n: self._memory.read(loaded.views[n], dtype(s.dtype).storage) for n, s in self._specs.items()}

    def release(self) -> None:
        """Lets go of the module, and gives the pages that the allocator kept (see env.toml) back to the system."""
        del self._function, self._forward, self._call
        ctypes.CDLL(None).malloc_trim(0)
