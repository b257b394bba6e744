"""Record a training script while it runs: allocator history, steps, phases, modules, owners of memory."""
