"""The versions that a trace's figures may depend on."""

import platform

import torch

from memfit import __version__


def versions() -> dict[str, str]:
    """Return those that every process knows; a ground adds its own."""
    return {
        "memfit": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
    }
