"""The attention kernels that users have today, through torch: cuDNN's (the baseline on a GPU) and FlashAttention."""
