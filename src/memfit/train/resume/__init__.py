"""Save a run and resume it: what is saved, whether it suits an engine, and its files."""
