"""Labels: what the script is doing, stamped by PyTorch on every event of its allocator history.

PyTorch keeps one string per thread (``_set_memory_metadata``) and copies it into each event. memfit
sets that string to a serial number and keeps the meaning of every number here:

    serials   0  1  2  3  4  5 ...           one per change of label, on any thread
    label     setup  forward/h.0  ...        serial -> (phase, module, op, stack)

Serials only ever grow, so they also serve as timestamps without a clock: a mark set at serial 40 precedes
the first event that carries 40 or more. A recorder that watches for hours forgets past serials: the
remaining ones are counted from there, and older events have none.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from memfit.records import EventLabel, MarkKind, Phase

PREFIX = "memfit:"


class LabelBook:
    """Every label of one run, the label in force on each thread, and the marks between events."""

    def __init__(self) -> None:
        self._stamp: Callable[[int], None] | None = None
        self.forgotten = 0
        """Number of serials before the first that is kept."""
        self.labels: list[EventLabel] = []
        """Every label, in the order of first use."""
        self._index: dict[tuple[Phase, str, str, int], int] = {}
        self._adding = threading.Lock()
        self.serials: list[int] = []
        """Label index of each serial."""
        self.marks: list[tuple[int, MarkKind, int]] = []
        """(serial, kind, index): the mark precedes the first event of that serial or a later one."""
        self.listeners: list[Callable[[MarkKind, int], None]] = []
        """Each is called with the kind and the index of a mark that has just been added."""
        self.on_use: Callable[[int], None] | None = None
        """Called with each label that has just been put in force, on its thread."""
        self._current: dict[int, int] = {}
        self.use(self.intern(Phase.SETUP))

    def stamp_with(self, stamp: Callable[[int], None] | None) -> None:
        """Start stamping serials on the allocator's events, or stop.

        Stamping cannot begin with the book: PyTorch's allocator reads its settings at the first call, and the
        script may still have to set them.

        Args:
            stamp: called with the serial to put on the calling thread's events, counted from the very first;
                None to stop.
        """
        self._stamp = stamp
        self.use(self.current())

    def forget(self) -> None:
        """Forget all serials and marks so far; the label in force on each thread remains."""
        self.forgotten += len(self.serials)
        self.serials.clear()
        self.marks.clear()
        self.use(self.current())

    def intern(self, phase: Phase, module: str = "", op: str = "", stack: int = -1) -> int:
        """Return the index of a label, the same for equal labels."""
        key = (phase, module, op, stack)  # faster to look up than a Label, on a hot path
        found = self._index.get(key)
        if found is None:
            with self._adding:  # a backward runs on its own threads
                found = self._index.get(key, len(self.labels))
                if found == len(self.labels):
                    self.labels.append(EventLabel(*key))
                    self._index[key] = found
        return found

    def add(self, label: EventLabel) -> int:
        """Return the index of a label as ``intern`` does."""
        return self.intern(label.phase, label.module, label.op, label.stack)

    def use(self, label: int) -> None:
        """Put a label in force on the calling thread."""
        self._current[threading.get_ident()] = label
        self.serials.append(label)
        if self._stamp is not None:
            self._stamp(self.forgotten + len(self.serials) - 1)
        if self.on_use is not None:
            self.on_use(label)

    @contextmanager
    def doing(self, op: str) -> Iterator[None]:
        """Label the calling thread with an op within, in addition to its phase and module."""
        before = self.current()
        label = self.labels[before]
        self.use(self.intern(label.phase, label.module, op, label.stack))
        try:
            yield
        finally:
            self.use(before)

    def current(self) -> int:
        """Return the label in force on the calling thread; label 0 (setup) where none was set."""
        # Keyed by thread identity: threads that PyTorch starts lose their Python thread-locals
        # every time they leave Python.
        return self._current.get(threading.get_ident(), 0)

    @property
    def phase(self) -> Phase:
        """The phase of the calling thread."""
        return self.labels[self.current()].phase

    def moment(self) -> int:
        """Return a new serial: all events so far carry smaller ones."""
        self.use(self.current())
        return len(self.serials) - 1

    def mark(self, kind: MarkKind, index: int) -> None:
        """Add a mark at this moment."""
        self.marks.append((self.moment(), kind, index))
        for listener in self.listeners:
            listener(kind, index)


def metadata_of_serial(serial: int) -> str:
    """Return the metadata string that stands for a serial."""
    return f"{PREFIX}{serial}"


def serial_in_metadata(metadata: str) -> int:
    """Return the serial in an event's metadata string, or -1 for a string that memfit did not set.

    >>> serial_in_metadata("memfit:17"), serial_in_metadata(""), serial_in_metadata("mine")
    (17, -1, -1)
    """
    digits = metadata.removeprefix(PREFIX) if metadata.startswith(PREFIX) else ""
    return int(digits) if digits.isdecimal() else -1
