"""What a process records while a script trains: allocator history, steps, phases, modules, owners."""
