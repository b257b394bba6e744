"""Training that carries a plan out, and stays exactly right."""
