"""Ranks on the ghost: those that run beside the script, and those that do not exist."""
