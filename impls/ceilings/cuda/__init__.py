"""Probes for NVIDIA GPUs: CUDA C++ compiled at run time by NVRTC, launched through the driver."""
