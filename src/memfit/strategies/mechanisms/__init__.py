"""How strategies work: recomputed forwards, saved tensors on the host, modules selected by name."""
