"""Mark the moments at which the script resets PyTorch's peaks or empties its cache."""

from collections.abc import Callable
from functools import partial

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch, before
from memfit.recording.event_labels import LabelBook
from memfit.records import MarkKind

_MARKED_CALLS = {
    "_cuda_resetPeakMemoryStats": MarkKind.RESET_PEAK,
    "_accelerator_resetPeakStats": MarkKind.RESET_PEAK,
    "_cuda_emptyCache": MarkKind.EMPTY_CACHE,
    "_accelerator_emptyCache": MarkKind.EMPTY_CACHE,
}
"""Functions of ``torch._C`` and the mark that a call of each leaves."""
_PEAKS = Patch("torch._C", *_MARKED_CALLS, why="mark where a script resets peaks or empties the cache")


def mark_calls(hooks: InstalledHooks, book: LabelBook) -> None:
    """From now on, add a mark to the book at each such call."""

    def marker(kind: MarkKind) -> Callable[..., None]:
        return lambda *_args: book.mark(kind, 0)

    for name, kind in _MARKED_CALLS.items():
        hooks.replace(_PEAKS, name, partial(before, marker(kind)))
