"""What a trace means: the peak, who holds it, whether it grows."""
