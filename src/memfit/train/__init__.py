"""Training: an engine that carries out a plan with exactly the result of plain training."""
