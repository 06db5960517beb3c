"""The core clock, measured: a chain of additions, each of which waits for the one before and takes one cycle.

Owns the chain. Time is the thread's own CPU time, so that a thread that was interrupted does not look slow. Both
operands are registers: recent cores do additions of small constants at no cost when they rename registers.
"""

from __future__ import annotations

import numpy as np

_PER_TURN = 256
_TURNS = 8192
#: Additions, and so cycles, of one reading.
ADDITIONS = _PER_TURN * _TURNS
_ADD = {"x86_64": "addq $1, $0", "aarch64": "add $0, $0, $1"}
_THREAD_CPU_TIME = 3  # CLOCK_THREAD_CPUTIME_ID (linux/time.h)

#: Words (int64) of a thread's arguments, all results: seconds and nanoseconds before, after; the chain's last value.
WORDS = 5


def clock_ir(machine: str) -> str:
    """IR of ``@clock``.

    Args:
        machine: ``x86_64`` or ``aarch64``.
    """
    return f"""
declare i32 @clock_gettime(i32, ptr)

define void @clock(ptr %result) {{
entry:
  %after = getelementptr i64, ptr %result, i64 2
  %last = getelementptr i64, ptr %result, i64 4
  %one = load volatile i64, ptr %last
  call i32 @clock_gettime(i32 {_THREAD_CPU_TIME}, ptr %result)
  br label %turn
turn:
  %n = phi i64 [ 0, %entry ], [ %n.next, %turn ]
  %x = phi i64 [ 0, %entry ], [ %x.next, %turn ]
  %x.next = call i64 asm sideeffect ".rept {_PER_TURN}\\0A{_ADD[machine]}\\0A.endr", "=r,r,0"(i64 %one, i64 %x)
  %n.next = add i64 %n, 1
  %more = icmp ult i64 %n.next, {_TURNS}
  br i1 %more, label %turn, label %leave
leave:
  call i32 @clock_gettime(i32 {_THREAD_CPU_TIME}, ptr %after)
  store i64 %x.next, ptr %last
  ret void
}}
"""


def clock_ghz(results: np.ndarray) -> np.ndarray:
    """Cycles per nanosecond of each thread's chain, from the filled argument rows (threads, 5)."""
    before = results[:, 0] * 1_000_000_000 + results[:, 1]
    after = results[:, 2] * 1_000_000_000 + results[:, 3]
    return np.asarray(ADDITIONS / (after - before))
