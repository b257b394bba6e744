"""The ghost: a stand-in CUDA runtime with no GPU behind it; allocations are real, nothing is computed."""
