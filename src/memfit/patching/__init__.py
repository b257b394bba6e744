"""Changes to PyTorch and other libraries while a script runs: declared, installed, removed, listed."""
