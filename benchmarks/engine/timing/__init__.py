"""How a time is taken: one module per kind of device, each with ``block`` (see ``cpu.block``) run in the worker."""
