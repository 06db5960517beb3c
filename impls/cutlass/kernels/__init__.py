"""Kernels of the stack, and what writes, loads and launches them."""
