"""Torch's process-wide settings, the same for every implementation that runs torch.

Owns threads, f32 precision, and in what a GPU's products may add up. It imports torch: implementations import it inside
``prepare``, never at module level.
"""

from __future__ import annotations

from typing import Any

import torch

from impls.contract import Device


def configure(device: Device, precision: str = "highest") -> dict[str, Any]:
    """Use the device's threads; what then holds, for a program's ``config``.

    On a GPU, partial sums of a split K are kept out of f16 and bf16, in which torch adds them up unless told otherwise.

    Args:
        device: the device.
        precision: of f32 products: ``highest`` is f32, ``high`` is TF32 on a GPU.
    """
    torch.set_num_threads(device.threads)
    # Also tells oneDNN to keep f32 products in f32 (torch.backends.mkldnn.matmul.fp32_precision becomes "ieee").
    torch.set_float32_matmul_precision(precision)
    if device.kind == "cuda":
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        return {"float32_matmul_precision": precision, "reduced_precision_reduction": False}
    return {
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "onednn_fp32_precision": torch.backends.mkldnn.matmul.fp32_precision,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
