"""Marks of tests of what only some versions of PyTorch do; ``make test-versions`` counts the reasons."""

import pytest
import torch

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))


def needs_torch(oldest, reason):
    """Return a mark that skips a test with PyTorch older than ``oldest``, such as (2, 12)."""
    lacks = f"before PyTorch {'.'.join(map(str, oldest))}: {reason}"
    return pytest.mark.skipif(oldest > RELEASE, reason=lacks)
