"""CUTLASS: GEMM by its C++ collectives, GEMM and attention by its CuTe DSL, compiled beforehand for sm_90a."""
