"""What memfit prints on the terminal."""
