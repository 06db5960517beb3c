"""What needs JAX at module level: imported inside ``prepare``, never by the harness.

- ``program``: a jitted function over a case's inputs as a program of the contract; ``tpu_program``: one interpreted.
- ``shared_memory``: how tiles lie in a multiprocessor's memory.
- ``mosaic_gemm``, ``mosaic_attention``: kernels for Hopper GPUs, in Mosaic GPU.
- ``tpu_gemm``, ``tpu_attention``: kernels for TPUs; ``tpu_compiling``: what they become on TPUs that are not there.
"""
