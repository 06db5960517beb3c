"""cuBLASLt as its vendor offers it: the first heuristic (the baseline of GEMM on a GPU), and the best of a search."""
