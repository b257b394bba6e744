"""Traces in files: memfit's own and PyTorch's snapshots. Nothing here imports torch."""
