"""Compile the ghost runtime for the installed PyTorch, and stubs for its extensions."""
