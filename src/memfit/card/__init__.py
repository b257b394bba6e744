"""This machine's GPU: its identity, and the memory that a process holds outside PyTorch's allocator."""
