"""Property tests run without a deadline, which says nothing on a shared machine; BLAS runs in one thread."""

import os

from hypothesis import settings

# Effective where NumPy is not yet imported: small products spend their time waking threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
