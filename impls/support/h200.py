"""The H200 that results come from, for what is compiled or decided where there is none. Facts, no measurements."""

from __future__ import annotations

from impls.contract import Device

H200 = Device("cuda", "NVIDIA H200", "sm_90", 1, 140 * 2**30)
MULTIPROCESSORS = 132
