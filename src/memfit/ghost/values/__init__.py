"""The values that a script reads from the GPU, which the ghost does not compute."""
