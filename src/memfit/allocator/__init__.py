"""PyTorch's caching allocator, replayed from its own history. Nothing here imports torch."""
