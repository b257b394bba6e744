"""Batches: where a run stands in its data, and how they are divided."""
