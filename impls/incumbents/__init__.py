"""What users have today: cuDNN's attention (the baseline on a GPU) and FlashAttention through torch, and the kernels of
FlashAttention-4 and QuACK (GEMM) without their host libraries.
"""
