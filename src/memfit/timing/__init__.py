"""How long a training step takes: kernels on a card, the host, and the two together."""
