"""One process runs the user's script: the parent starts it, the child runs it on the ghost or a GPU."""
