"""Loops in which a script waits for a value that another rank, which does not exist, would set in a store."""

import threading
import time
from collections.abc import Callable

from memfit.user_frame import user_line

_PATIENCE = 5.0
"""Seconds in which a line may ask for the same keys, while the GPU has no work."""
_QUESTIONS = 3
"""How often the line must have asked: it may be slow for another reason."""


class EndlessWaits:
    """What a script asks of its stores, to notice a question that it would ask for ever.

    A training loop that asks once a step gives the GPU work in between. Threads other than the main one may
    watch a key for the whole run: they do not stop the script.

    Args:
        refuse: called with the reason when the script waits for a value that no rank will set.
        work: returns a number that grows whenever the script gives the GPU work.
    """

    def __init__(self, refuse: Callable[[str], object], work: Callable[[], int]) -> None:
        self._refuse = refuse
        self._work = work
        self._worked = 0
        self._asked: dict[tuple[str, tuple[str, ...]], tuple[float, int]] = {}

    def ask(self, keys: tuple[str, ...]) -> None:
        """Note that this thread asks for keys; refuse the script if it has waited for them too long."""
        if threading.get_ident() != threading.main_thread().ident:
            return
        now, worked = time.monotonic(), self._work()
        if worked != self._worked:
            self._worked = worked
            self._asked.clear()
        place = user_line()
        began, times = self._asked.get((place, keys), (now, 0))
        self._asked[place, keys] = began, times + 1
        if times >= _QUESTIONS and now - began > _PATIENCE:
            names = ", ".join(repr(key.rpartition("//")[2]) for key in keys)  # without the group's prefix
            self._refuse(
                f"{place} waits in a loop for another rank to change {names} in a store. memfit runs one "
                "rank at a time, so nothing changes it. Run all ranks at once: "
                "torchrun --nproc-per-node N -m memfit dry-run SCRIPT."
            )
