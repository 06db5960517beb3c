"""What needs TVM at module level: imported inside ``prepare`` and by the tuner, never by the harness.

``arithmetic`` says how one packed word multiplies, ``micro`` is the register-blocked kernel, ``product`` the packed
product around it and its schedule, ``elements`` what happens to single elements,
``pipeline`` how Relax reaches all that; ``compiled`` makes it callable.
"""
