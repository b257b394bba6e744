"""The versions that a trace's figures may depend on."""

import platform

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Return those that every process knows; a backend adds its own."""
    import torch

    return {
        "memfit": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
    }
