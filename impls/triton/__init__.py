"""Triton: tile programs compiled for GPUs; on a CPU its interpreter runs them, to be judged and never timed."""
