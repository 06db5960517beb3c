"""Stacks that cheat, crash and hang. The registry finds them where RIDGEMARK_EXTRA_STACKS names this package.

What cannot be caught, or only by its time:

- Answers remembered until the inputs change, and work done while inputs are loaded (``memoises_until_refill``,
  ``beforehand``): the outputs are right. A time that physics does not allow gives them away, and so does a first call
  after new contents that is much slower than the rest; a cheat that is slower than physics and even is not seen.
- A thread that ends its work after the call has returned but before the output is copied, within microseconds. Work
  put off for longer is unwritten then (``early``) or shows as time that the reading took (``deferred``).
- A call skipped less often than once per streak of checked calls, beside the kept ones of the timed blocks.
- A process that is started with an emptied environment and in a session of its own outlives its worker.
- Wrong elements that a sampled reference and Freivalds' check both miss: the workloads say which.
"""
