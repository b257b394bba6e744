"""The public JSON of each command."""
