"""cuBLASLt's C interface and what is built on it."""
