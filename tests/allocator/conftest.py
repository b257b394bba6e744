"""Tests that ask for a situation get each of them; ``drive`` drives PyTorch's real allocator in it."""

from support.allocator_situations import drive, pytest_generate_tests

__all__ = ["drive", "pytest_generate_tests"]
