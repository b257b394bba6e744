"""How strategies do what they do: forwards run again, tensors that wait elsewhere, modules by name."""
