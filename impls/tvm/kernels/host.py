"""The CPU that code is compiled for: TVM's target, the vector unit, the L2 cache.

LLVM knows the CPU by name and with it the features of the silicon; what the system has switched off (a hypervisor may)
is taken out again by what the device says it has.
"""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm.target import codegen

from impls.contract import Device
from impls.tvm.tiling import VectorUnit

# Linux's names of features that decide how code is generated here, and LLVM's.
_NAMES = {
    "avx2": "avx2",
    "fma": "fma",
    "avx512f": "avx512f",
    "avx512_bf16": "avx512bf16",
    "avx512_vnni": "avx512vnni",
}
# Every server core of the last ten years has this much.
_LEAST_L2 = 512 << 10


@dataclass(frozen=True)
class Host:
    """What code is compiled for.

    Attributes:
        target: TVM's target.
        features: LLVM's names of instruction-set features.
        unit: the vector unit.
        l2_bytes: L2 cache of a core.
        threads: threads that a call may use.
    """

    target: tvm.target.Target
    features: frozenset[str]
    unit: VectorUnit
    l2_bytes: int
    threads: int

    def has(self, feature: str) -> bool:
        """Whether code may use ``feature`` (LLVM's name)."""
        return feature in self.features


def of(device: Device) -> Host:
    """The host that ``device`` names."""
    missing = frozenset(llvm for linux, llvm in _NAMES.items() if linux not in device.features)
    return _host(family(), device.arch, missing, device.threads)


def family() -> str:
    """LLVM's name of this CPU, e.g. ``znver4``."""
    return str(codegen.llvm_get_system_cpu())


def native(threads: int) -> Host:
    """The host with all that LLVM knows of this CPU; where there is no ``Device`` to ask."""
    return _host(family(), platform.machine(), frozenset(), threads)


@functools.cache
def _host(cpu: str, arch: str, missing: frozenset[str], threads: int) -> Host:
    """The host of an LLVM CPU name without some of its features."""
    plain = tvm.target.Target({"kind": "llvm", "mcpu": cpu})
    native = {str(f) for f in codegen.llvm_get_cpu_features(plain)}
    absent = sorted(native & missing)
    if "avx512f" in absent:
        absent = sorted({*absent, *(f for f in native if f.startswith("avx512"))})
    target = plain
    if absent:
        target = tvm.target.Target({"kind": "llvm", "mcpu": cpu, "mattr": [f"-{f}" for f in absent]})
    features = frozenset(native - set(absent))
    return Host(target, features, vector_unit(arch, features), _l2_bytes(), threads)


def vector_unit(arch: str, features: frozenset[str]) -> VectorUnit:
    """What a CPU with these features (LLVM's names) computes with."""
    if "avx512f" in features:
        return VectorUnit(16, 32)
    if "avx2" in features:
        return VectorUnit(8, 16)
    return VectorUnit(4, 32, temporaries=4) if arch == "aarch64" else VectorUnit(4, 16)


def _l2_bytes() -> int:
    """The L2 cache of the first CPU, as Linux shows it; a server core's least where it shows none."""
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            if (index / "level").read_text().strip() == "2":
                size = (index / "size").read_text().strip()
                return int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return _LEAST_L2
