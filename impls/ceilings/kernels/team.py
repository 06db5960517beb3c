"""A team of native threads, one pinned to each core, that sleep until a kernel is to run on all of them.

Owns starting, waking, waiting and stopping. A call of a kernel costs one wake-up and no Python on any thread but the
caller's: Python's own locks would hand the interpreter from thread to thread, which takes milliseconds on a hundred
cores. Waiting is a futex, never a spin: a sleeping team takes no time from other processes. Linux only, therefore.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading

import numpy as np

from impls.ceilings.kernels.jit import Native

# Number of the futex system call (Linux, arch/*/include/uapi/asm/unistd.h) and its operations (linux/futex.h).
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 128, 129  # FUTEX_WAIT and FUTEX_WAKE, both with FUTEX_PRIVATE_FLAG
_EVERYONE = 2**31 - 1

# The team's state, each word on a cache line of its own (offsets in bytes).
_EPOCH, _RUNNING, _TASK, _LINES = 0, 64, 128, 256


def team_ir(futex_call: int) -> str:
    """IR of ``@member`` (a thread's life) and ``@dispatch`` (one call of a kernel on all of them).

    ``@member`` waits for the epoch to change, calls the task with its own row of arguments, counts itself off, and
    wakes the caller if it was the last. A null task ends it.
    """
    return f"""
declare i64 @syscall(i64, ...)

define void @member(ptr %team, i64 %index) {{
entry:
  %running = getelementptr i8, ptr %team, i64 {_RUNNING}
  %task.slot = getelementptr i8, ptr %team, i64 {_TASK}
  %arguments.slot = getelementptr i8, ptr %team, i64 {_TASK + 8}
  %stride.slot = getelementptr i8, ptr %team, i64 {_TASK + 16}
  br label %look
look:
  %seen = phi i32 [ 0, %entry ], [ %seen, %sleep ], [ %epoch, %call ], [ %epoch, %last ]
  %epoch = load atomic i32, ptr %team acquire, align 4
  %same = icmp eq i32 %epoch, %seen
  br i1 %same, label %sleep, label %woken
sleep:
  call i64 (i64, ...) @syscall(i64 {futex_call}, ptr %team, i64 {_WAIT}, i32 %seen, ptr null)
  br label %look
woken:
  %task = load ptr, ptr %task.slot
  %over = icmp eq ptr %task, null
  br i1 %over, label %leave, label %call
call:
  %arguments = load ptr, ptr %arguments.slot
  %stride = load i64, ptr %stride.slot
  %offset = mul i64 %stride, %index
  %mine = getelementptr i8, ptr %arguments, i64 %offset
  call void %task(ptr %mine)
  %before = atomicrmw sub ptr %running, i32 1 acq_rel
  %others = icmp ne i32 %before, 1
  br i1 %others, label %look, label %last
last:
  call i64 (i64, ...) @syscall(i64 {futex_call}, ptr %running, i64 {_WAKE}, i32 1)
  br label %look
leave:
  ret void
}}

define void @dispatch(ptr %team, i32 %members) {{
entry:
  %running = getelementptr i8, ptr %team, i64 {_RUNNING}
  store atomic i32 %members, ptr %running release, align 4
  atomicrmw add ptr %team, i32 1 release
  call i64 (i64, ...) @syscall(i64 {futex_call}, ptr %team, i64 {_WAKE}, i32 {_EVERYONE})
  br label %look
look:
  %left = load atomic i32, ptr %running acquire, align 4
  %done = icmp eq i32 %left, 0
  br i1 %done, label %leave, label %sleep
sleep:
  call i64 (i64, ...) @syscall(i64 {futex_call}, ptr %running, i64 {_WAIT}, i32 %left, ptr null)
  br label %look
leave:
  ret void
}}
"""


class Team:
    """``size`` threads, pinned to the first ``size`` CPUs of this process's affinity.

    Attributes:
        cpus: the CPU of each member.
    """

    def __init__(self, size: int) -> None:
        allowed = sorted(os.sched_getaffinity(0))
        if size > len(allowed):
            raise ValueError(f"{size} threads, but this process may use {len(allowed)} CPUs: widen its affinity")
        self.cpus = allowed[:size]
        self._native = Native(team_ir(_FUTEX_CALL[platform.machine()]))
        self._state = np.zeros(_LINES + 64, np.uint8)
        start = -self._state.ctypes.data % 64
        self._address = self._state.ctypes.data + start
        self._task = self._state[start + _TASK : start + _TASK + 24].view(np.int64)
        self._dispatch = self._native.function("dispatch", ctypes.c_void_p, ctypes.c_int32)
        self._threads = [threading.Thread(target=self._live, args=(i,), daemon=True) for i in range(size)]
        for thread in self._threads:
            thread.start()

    def _live(self, index: int) -> None:
        os.sched_setaffinity(0, {self.cpus[index]})  # on Linux: of the calling thread
        self._native.function("member", ctypes.c_void_p, ctypes.c_int64)(self._address, index)

    def run(self, kernel: int, arguments: np.ndarray) -> None:
        """Call the kernel at address ``kernel`` on every member, each with its row of ``arguments`` (int64)."""
        self._task[:] = kernel, arguments.ctypes.data, arguments.strides[0]
        self._dispatch(self._address, len(self._threads))

    def stop(self) -> None:
        """End the threads. The team cannot run anything afterwards."""
        if self._threads:
            self._task[0] = 0
            self._dispatch(self._address, 0)
            for thread in self._threads:
                thread.join()
            self._threads = []
