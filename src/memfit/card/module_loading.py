"""Whether CUDA loads kernels on first use or all at once, and what the second adds to a process's memory."""

from collections.abc import Mapping
from dataclasses import replace

from memfit.devices import observations
from memfit.units import format_bytes

SETTING = "CUDA_MODULE_LOADING=EAGER"
_ALL_AT_ONCE = f"after work, {SETTING}"


def is_eager(environment: Mapping[str, str]) -> bool:
    """Return whether a process with these environment variables loads every kernel when CUDA starts.

    PyTorch sets the variable to LAZY if it is unset, and DEFAULT means LAZY since CUDA 12.2.
    Source: ``_lazy_init``, torch/cuda/__init__.py, PyTorch 2.14.1; CUDA Programming Guide, lazy loading.

    >>> is_eager({"CUDA_MODULE_LOADING": "EAGER"}), is_eager({})
    (True, False)
    """
    name, _, value = SETTING.partition("=")
    return environment.get(name) == value


def eager_loading() -> tuple[int, str]:
    """Return the bytes that loading every kernel adds, and their source: the same process, run both ways.

    The code of PyTorch and its libraries is loaded, whatever the size of the card.

    >>> eager_loading()[0] >> 20
    1250
    """
    eager = next(seen for seen in observations() if seen.what == _ALL_AT_ONCE)
    lazy = next(
        seen
        for seen in observations()
        if replace(seen, bytes=0) == replace(eager, bytes=0, what="after work")
    )
    more = eager.bytes - lazy.bytes
    return more, f"{SETTING} adds {format_bytes(more)}: {eager}, less the same without"
