"""What needs TVM at module level: imported inside ``prepare`` and by the tuner, never by the harness.

``arithmetic`` says how one packed word multiplies, ``micro`` is the register-blocked kernel, ``product`` the packed
product around it and its schedule, ``epilogue`` what follows a sum; ``lowering`` compiles and calls.
"""
