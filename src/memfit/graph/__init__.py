"""Captured graphs: which values a graph makes and uses, and which share memory."""
