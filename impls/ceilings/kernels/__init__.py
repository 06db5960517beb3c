"""Kernels of the ceilings: IR as text, compiled by LLVM for the host and run on all cores."""
