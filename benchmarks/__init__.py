"""The harness: asv suites, the command line, case files and the engine."""

import os

# Before NumPy is loaded: OpenBLAS's threads spin for tens of milliseconds after a product (its THREAD_TIMEOUT is 2^26
# cycles), which would fall into the timed block that follows a judgement. References get their parallelism from
# impls.workloads.parallel. Workers are given their own number of threads by the pool.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
