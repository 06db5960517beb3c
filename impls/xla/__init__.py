"""XLA through ``jax.jit``: what its compiler makes of a product or of attention written in plain jax."""
