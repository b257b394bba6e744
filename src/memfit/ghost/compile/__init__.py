"""Support for torch.compile and Triton on the ghost."""
