"""What people see: the terminal summary and the public JSON."""
