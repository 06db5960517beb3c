"""How the records in ``tuned/`` are made: ``python -m impls.tvm.tune``, in the stack's environment."""
