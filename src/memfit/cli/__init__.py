"""The command line: one module per command, and the console they print on."""
