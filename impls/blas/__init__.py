"""The vendor libraries as torch's eager mode calls them on a CPU: oneDNN and MKL. GEMM's and attention's baseline."""
