"""Torch's process-wide settings, the same for every implementation that runs torch on a CPU.

Owns threads and f32 precision. It imports torch: implementations import it inside ``prepare``, never at module level.
"""

from __future__ import annotations

from typing import Any

import torch

from impls.contract import Device


def configure(device: Device) -> dict[str, Any]:
    """Use the device's threads and full f32 precision; what then holds, for a program's ``config``."""
    torch.set_num_threads(device.threads)
    # Also tells oneDNN to keep f32 products in f32 (torch.backends.mkldnn.matmul.fp32_precision becomes "ieee").
    torch.set_float32_matmul_precision("highest")
    return {
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "onednn_fp32_precision": torch.backends.mkldnn.matmul.fp32_precision,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
