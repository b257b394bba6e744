"""The versions of memfit, PyTorch, CUDA and Python, which a trace's figures may depend on."""

import platform

__version__ = "0.1.0"


def software_versions() -> dict[str, str]:
    """Return the versions that are known in every process; a backend adds its own."""
    import torch

    return {
        "memfit": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
    }
