"""A live model and one training step, serialised and run on the ghost."""
