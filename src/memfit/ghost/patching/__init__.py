"""Ways to patch PyTorch from outside: after an import, before a call, in place of a kernel."""
