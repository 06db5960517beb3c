"""One honest GEMM and many that are not: NumPy only, f32, no layout, batch or epilogue.

honest, common: what the others are made from. values: wrong numbers. memory: right at first, or while nobody looks.
work: the work is not where the clock is. manners: prints, leaves processes behind, closes what is not its own.
deaths: ends, hangs, eats memory, raises.
"""
