"""This machine's GPU: which one it is, and what a process holds on it outside PyTorch's allocator."""
