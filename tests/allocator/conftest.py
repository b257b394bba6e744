"""Tests with a parameter ``situation`` run in each; ``drive`` drives PyTorch's real allocator in it."""

from support.allocator_situations import drive, pytest_generate_tests

__all__ = ["drive", "pytest_generate_tests"]
