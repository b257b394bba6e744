"""Batches: a run's position in its data, and how batches are divided."""
