"""A real run, watched: what it holds against what was predicted, and what it held when memory ran out."""
