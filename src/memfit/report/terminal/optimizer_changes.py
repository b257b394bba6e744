"""What a plan changes about an optimizer: settings of ``memfit.OptimizerState``."""

from collections.abc import Iterator, Mapping
from typing import Any

_WORDS = {
    "bits": (
        "{bits}-bit optimizer state",
        "The optimizer's state has {bits} bits ({backend}).",
    ),
    "offload": (
        "optimizer state offloaded",
        "The optimizer's state waits on the host between updates, which are made on the GPU.",
    ),
    "step_in_backward": (
        "step in backward",
        "The backward updates each parameter once its gradient is complete, and frees the gradient.",
    ),
}
"""By setting: in a few words, and in a sentence."""


def optimizer_state(settings: Mapping[str, Any]) -> Iterator[str]:
    """Name the settings, in a few words each.

    >>> list(optimizer_state({"bits": 8, "step_in_backward": True}))
    ['8-bit optimizer state', 'step in backward']
    """
    return (words for words, _ in _filled(settings))


def optimizer_changes(settings: Mapping[str, Any]) -> Iterator[str]:
    """Say what a plan changes about the optimizer, in a sentence for each setting."""
    return (sentence for _, sentence in _filled(settings))


def _filled(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    values = {"backend": "torchao", **settings}
    for name, (words, sentence) in _WORDS.items():
        if settings.get(name):
            yield words.format(**values), sentence.format(**values)
