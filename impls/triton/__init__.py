"""Triton: tile programs, compiled by Triton for GPUs; on a CPU its interpreter runs them, to be judged and not timed."""
