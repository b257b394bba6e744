"""What autocast keeps: copies of parameters in its dtype, made at their first use and dropped at its end.

    with torch.autocast("cuda", torch.bfloat16):
        model(x)          copies, and for the backward the graph keeps those that it wants
    at the end            all that only autocast still held is freed at once, and so gives itself away

Source: ``cached_cast`` in aten/src/ATen/autocast_mode.cpp and ``autocast.__exit__`` in
torch/amp/autocast_mode.py, PyTorch 2.14.1: of leaves that want gradients; there is no list of them to read.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from memfit.recording.hooks import LiftedHooks
from memfit.recording.labels import LabelBook
from memfit.records import Action, Category, Events

ENDS = "autocast's end"
COPY = "autocast's copy of a parameter"


def watch(hooks: LiftedHooks, book: LabelBook) -> None:
    """From now on label what happens at the end of each autocast of the process."""

    def leave(original: Callable[..., Any], *args: Any) -> Any:
        with book.doing(ENDS):
            return original(*args)

    hooks.wrap(torch.amp.autocast_mode.autocast, "__exit__", leave)


def mark_copies(events: Events, book: LabelBook) -> None:
    """Name the allocations that autocast's end freed, in place; those that a graph had saved have a name."""
    ends = {index for index, label in enumerate(book.labels) if label.op == ENDS}
    if not ends:
        return
    made: dict[int, int] = {}
    columns = (events.action, events.address, events.label)
    for position, (action, address, label) in enumerate(zip(*(one.tolist() for one in columns), strict=True)):
        if action == Action.ALLOC:
            made[address] = position
        elif action == Action.FREE_REQUESTED and label in ends and address in made:
            copy = made[address]
            if events.category[copy] == Category.UNKNOWN:
                events.category[copy] = Category.TEMPORARY
                events.label[copy] = book.add(replace(book.labels[events.label[copy]], op=COPY))
