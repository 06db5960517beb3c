"""What needs TVM at module level: imported inside ``prepare`` and by the tuner, never by the harness.

- ``host``: the CPU that code is for; ``compiled``: from a module to a callable; ``arrays``: NumPy's memory as tensors.
- ``arithmetic``: how packed words multiply; ``elements``: what happens to single elements; ``micro``: the tile of sums.
- ``product``: the packed product and its schedule; ``dot``: the one without packing; ``gemm``: a case by either.
- ``attention``: the fused forward pass; ``decode``: the one of few query rows.
- ``plain``: what MetaSchedule starts from.
- ``graphs``: cases as Relax functions; ``pipeline``: how those are fused and scheduled; ``relaxed``: the program.
"""
