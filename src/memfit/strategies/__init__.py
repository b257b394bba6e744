"""Ways to train with less memory: one file per strategy, with its settings, and plans that combine them."""
