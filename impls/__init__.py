"""The project under test: workloads and one package per stack.

Imports nothing of ``benchmarks`` or ``analysis``.
"""
