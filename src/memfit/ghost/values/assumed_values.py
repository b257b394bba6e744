"""Values the ghost returns for GPU reads, with the line of each read.

known       the tensor's value, if it is known (``known_values.py``)
prepared    answers to reads that PyTorch makes inside one of its own ops
assumed     otherwise: 1.0, 1 or False, each noted once per line
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from memfit.errors import TargetError
from memfit.ghost.note_callback import NoteCallback
from memfit.ghost.values.known_values import Basis, Known, KnownValues, Number
from memfit.ghost.values.value_options import ValueOptions
from memfit.records import Provenance
from memfit.user_frame import user_line

_MAX_READS = 100_000
"""Assumed values that one line may read without a training step, before its loop counts as endless."""

_NOTHING_COMPUTED = "The ghost computes nothing, so"
_BASIS_NOTES = {
    Basis.FINITE: "GPU values are assumed to be finite: the read returned {answer}.",
    Basis.CHECKED: "Checks on GPU values are assumed to pass: the read returned {answer}. "
    "--values all=false or bool=true changes this assumption.",
}


@dataclass(frozen=True, slots=True)
class GpuRead:
    """One read of an unknown GPU value, and the value the ghost returned."""

    where: str
    """``file:line``, or the module if Python has no frame."""
    kind: str
    """The ``--values`` key for it (``float``, ``int``, ``bool``, ``all`` or ``count``), or ``zeros``."""
    answer: Number


class AssumedValues:
    """The answers to the script's GPU reads, and the notes about them.

    ``known`` holds the known values of tensors; see ``gpu_reads.install`` for the arguments.
    """

    def __init__(self, options: ValueOptions, note: NoteCallback, fallback_where: Callable[[], str]) -> None:
        self.options = options
        self.known = KnownValues()
        self._note = note
        self._fallback_where = fallback_where
        self._noted: set[tuple[str, str]] = set()
        self._reads: deque[GpuRead] = deque(maxlen=8)
        self._assumed: Counter[str] = Counter()
        self._thread = threading.local()
        self._referenced: tuple[object, ...] = ()

    def keep(self, *objects: object) -> None:
        """Hold references to objects that must live as long as this one."""
        self._referenced = objects

    def last_reads(self) -> list[GpuRead]:
        """Return the last few reads of unknown values, oldest first."""
        return list(self._reads)

    def hint(self) -> str:
        """Describe the last assumed value in one line, or return an empty string if there was none.

        For the reader of an exception that this value may have caused.
        """
        if not self._reads:
            return ""
        read = self._reads[-1]
        where = read.where or "The script"
        if read.kind == "zeros":
            return f"{where} copied GPU values to the CPU. {_NOTHING_COMPUTED} the copy holds zeros."
        answer = f"{read.answer} elements" if read.kind == "count" else repr(read.answer)
        return (
            f"{where} read a GPU value. {_NOTHING_COMPUTED} it returned {answer}. "
            f"To choose another value, pass --values {read.kind}=…."
        )

    def stepped(self) -> None:
        """Record the end of a training step: no loop over GPU values has been endless so far."""
        self._assumed.clear()

    def assume(self, kind: str, answer: Number, text: str) -> None:
        """Add a read that returned ``answer`` to ``last_reads``, and note it once per line and text."""
        where = user_line() or self._fallback_where()
        self._reads.append(GpuRead(where, kind, answer))
        if (where, text) not in self._noted:
            self._noted.add((where, text))
            self._note(Provenance.ASSUMED, text, where, sizes=kind == "count")

    def answer(self, tensor: torch.Tensor, known: Known | None) -> Number | complex:
        """Answer a read of one element of ``tensor``: its ``known`` value, or an assumed one.

        Raises:
            TargetError: one line keeps reading unknown values in an endless loop.
        """
        if known is None:
            return self._assumed_value(tensor)
        if known.basis is not Basis.FILLED:
            kind = "bool" if known.basis is Basis.FINITE or not known.value else "all"
            self.assume(kind, known.value, _BASIS_NOTES[known.basis].format(answer=known.value))
        return known.value

    def _assumed_value(self, tensor: torch.Tensor) -> Number | complex:
        kind, answer = self._default(tensor.dtype)
        text = (
            f"The script read a GPU value. {_NOTHING_COMPUTED} it returned {answer}. "
            f"To choose another value, pass --values {kind}=…."
        )
        self.assume(kind, answer, text)
        where = self._reads[-1].where
        self._assumed[where] += 1
        if self._assumed[where] >= _MAX_READS:
            self._assumed.clear()
            raise TargetError(
                f"{where} read GPU values {_MAX_READS:,} times without a training step. {_NOTHING_COMPUTED} "
                f"each read returned {answer}. If the loop waits for a certain value, pass the value that "
                f"ends the loop: --values {kind}=…."
            )
        return complex(answer) if tensor.is_complex() else answer

    def _default(self, dtype: torch.dtype) -> tuple[str, Number]:
        """Return the ``--values`` key for a dtype, and the value it is set to."""
        if dtype == torch.bool:
            return "bool", self.options.truth
        if dtype.is_floating_point or dtype.is_complex:
            return "float", self.options.number
        return "int", self.options.integer

    @contextmanager
    def prepared(self, *answers: Number) -> Iterator[list[Number]]:
        """Answer this thread's next reads of one element, made inside a PyTorch op, with ``answers``.

        Yields the list of answers not used yet.
        """
        outer = getattr(self._thread, "answers", [])
        unread = self._thread.answers = list(answers)
        try:
            yield unread
        finally:
            self._thread.answers = outer

    def next_prepared(self) -> Number | None:
        """Remove and return this thread's next prepared answer, or None."""
        answers: list[Number] = getattr(self._thread, "answers", [])
        return answers.pop(0) if answers else None

    @property
    def counting(self) -> bool:
        """Whether the ghost itself answers this thread's small copies (``data_dependent_sizes.py``)."""
        return getattr(self._thread, "counting", False)

    @contextmanager
    def while_counting(self) -> Iterator[None]:
        """Leave this thread's reads of one element to the ghost."""
        self._thread.counting = True
        try:
            yield
        finally:
            self._thread.counting = False
