"""IREE: an ahead-of-time MLIR compiler and its runtime, on the host's CPU, its portable interpreter, and Vulkan."""
