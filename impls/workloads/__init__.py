"""Workloads: what a case is; its FLOPs, compulsory bytes, inputs, reference and tolerance.

Excluded for now: sparse shapes, MLA (Dqk != Dv), attention sinks, paged KV, attention in f8 (its scales would be
part of the case).
"""
