"""Values that a script reads from the ghost, where nothing is computed."""
