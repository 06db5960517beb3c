"""Kernels in Pallas, JAX's language for them: Mosaic GPU, the older Triton lowering, and TPU kernels."""
