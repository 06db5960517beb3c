"""The fixed baselines: what every implementation of a workload is compared with on a kind of device.

They do not follow the measurements: "the best of" is a view of the analysis.
"""

from __future__ import annotations

_BASELINES = {
    ("gemm", "cpu"): "blas.default",
    ("gemm", "cuda"): "cublas.default",
    ("attention", "cpu"): "blas.sdpa",
    ("attention", "cuda"): "incumbents.cudnn",
}


def baseline_of(workload: str, device_kind: str) -> str | None:
    """Name of the implementation that ``workload`` is compared with on a device kind; None where there is none."""
    return _BASELINES.get((workload, device_kind))
