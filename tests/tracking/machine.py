"""Prints what asv's benchmark processes take this machine to be: its record, its name, and what runs GEMMs here."""

import json
from dataclasses import asdict

from benchmarks.engine import machine
from impls import registry

device = machine.default_device()
names = {i.name for i in registry.implementations() if i.workload == "gemm" and device.kind in i.devices}
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
