"""Identify autocast's cache: copies of parameters in a lower dtype, made on first use and dropped on exit.

    with torch.autocast("cuda", torch.bfloat16):
        model(x)          makes copies; the graph keeps those that its backward needs
    on exit               copies that only autocast still held are all freed at once, which identifies them

Source: ``cached_cast`` in aten/src/ATen/autocast_mode.cpp and ``autocast.__exit__`` in
torch/amp/autocast_mode.py, PyTorch 2.14.1: autocast caches copies of leaves that require gradients; the cache
cannot be read.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.event_labels import LabelBook
from memfit.records import Action, Category, Events

_AUTOCAST = Patch("torch.amp.autocast_mode:autocast", "__exit__", why="find autocast's copies of parameters")

EXIT_OP = "autocast exit"
COPY_OP = "autocast's copy of a parameter"


def label_autocast_exits(hooks: InstalledHooks, book: LabelBook) -> None:
    """From now on, label the events during each exit of an autocast block."""

    def exit_autocast(original: Callable[..., Any], *args: Any) -> Any:
        with book.doing(EXIT_OP):
            return original(*args)

    hooks.wrap(_AUTOCAST, "__exit__", exit_autocast)


def name_copies(events: Events, book: LabelBook) -> None:
    """Label the allocations freed on exit from autocast, in place, unless a graph has named them already."""
    exits = {index for index, label in enumerate(book.labels) if label.op == EXIT_OP}
    if not exits:
        return
    allocated_at: dict[int, int] = {}
    rows = zip(events.action.tolist(), events.address.tolist(), events.label.tolist(), strict=True)
    for position, (action, address, label) in enumerate(rows):
        if action == Action.ALLOC:
            allocated_at[address] = position
        elif action == Action.FREE_REQUESTED and label in exits and address in allocated_at:
            copy = allocated_at[address]
            if events.category[copy] == Category.UNKNOWN:
                events.category[copy] = Category.TEMPORARY
                events.label[copy] = book.add(replace(book.labels[events.label[copy]], op=COPY_OP))
