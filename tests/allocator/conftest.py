"""Run tests that take ``situation`` in every situation; ``drive`` runs PyTorch's real allocator in one."""

from support.allocator_situations import drive, pytest_generate_tests

__all__ = ["drive", "pytest_generate_tests"]
