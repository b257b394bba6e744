"""Compiles the ghost runtime for the installed PyTorch, once."""
