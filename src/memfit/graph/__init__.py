"""Captured graphs: the values that a graph makes and uses, and which of them share memory."""
