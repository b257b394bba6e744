"""Saving a run and going on from it: what is saved, whether it suits, and files that are whole."""
