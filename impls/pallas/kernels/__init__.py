"""What needs JAX at module level: imported inside ``prepare``, never by the harness.

- ``program``: a jitted function over a case's inputs as a program of the contract; ``tpu_program``: one interpreted.
- ``mosaic_gemm``, ``mosaic_attention``, ``mosaic_decode``, ``mosaic_backward``: kernels for Hopper GPUs, in Mosaic GPU;
  ``shared_memory``: how their tiles lie in a multiprocessor's memory; ``mosaic_code``: what machine code they became.
- ``triton_gemm``, ``triton_attention``: kernels for the older GPU lowering; ``triton_tiles``: what they load.
- ``tpu_gemm``, ``tpu_attention``: kernels for TPUs; ``tpu_compiling``: what they become on TPUs that are not there.
"""
