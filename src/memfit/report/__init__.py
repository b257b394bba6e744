"""What memfit shows: text on the terminal, the public JSON, and the HTML page."""
