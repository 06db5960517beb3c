"""Prints what asv's benchmark processes take this machine to be: its record, its name, and what runs GEMMs here."""

import json
from dataclasses import asdict

from benchmarks.engine import machine
from benchmarks.suites._suite import implementations_here
from benchmarks.suites.gemm import Square

device = machine.default_device()
names = set(implementations_here(Square))
print(
    json.dumps(
        {
            "machine": machine.describe(),
            "device": asdict(device) | {"features": []},
            "name": machine.name(),
            "impls": sorted(names, key=lambda name: (name != "blas.default", name)),
        }
    )
)
