"""Ways to train with less memory: one file each, with its settings and what it conflicts with."""
