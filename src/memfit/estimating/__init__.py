"""Serialise a live model with its training step, and run it on the ghost."""
