"""What a script was told of GPU values that nobody had computed, and where it asked.

known       what it is told, if it is known (``known.py``)
prepared    answers to what an op of PyTorch's will read within
stand-in    1.0, 0 or False: the rest, each noted once with its line
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from memfit.errors import TargetError
from memfit.ghost.values.known_values import Basis, Known, KnownValues, Number
from memfit.ghost.values.value_options import ValueChoices
from memfit.records import Provenance
from memfit.user_frame import user_line


class Note(Protocol):
    """Takes note of something the reader of the figures must know; see ``records.Note``."""

    def __call__(
        self, provenance: Provenance, text: str, where: str, *, sizes: bool = False, objects: bool = False
    ) -> None:
        """Keep it."""


_PATIENCE = 100_000
"""Stand-ins given to one line, with no training step in between, before its loop is taken to be endless."""

_TOLD = {
    Basis.FINITE: "GPU values are taken to be finite: the script was told {answer}.",
    Basis.CHECKED: "Checks on GPU values are taken to pass: the script was told {answer}. "
    "Choose otherwise with --values all=false or bool=true.",
}


@dataclass(frozen=True, slots=True)
class Read:
    """One value that the script read and that nobody had computed."""

    where: str
    """``file:line``, or the module where Python has no frame."""
    kind: str
    """``float``, ``int``, ``bool``, ``all`` or ``count``: the key that changes the answer; or ``zeros``."""
    answer: Number


class Values:
    """The answers a script gets, and what is known and noted on the way.

    ``known`` holds what is known of tensors; see ``install`` for the rest.
    """

    def __init__(self, choices: ValueChoices, note: Note, fallback_where: Callable[[], str]) -> None:
        self.choices = choices
        self.known = KnownValues()
        self._note = note
        self._fallback_where = fallback_where
        self._noted: set[tuple[str, str]] = set()
        self._reads: deque[Read] = deque(maxlen=8)
        self._stand_ins: Counter[str] = Counter()
        self._thread = threading.local()
        self._kept: tuple[object, ...] = ()

    def keep(self, *kept: object) -> None:
        """Hold what must live as long as the answers do."""
        self._kept = kept

    def last_reads(self) -> list[Read]:
        """Return the last few values that nobody had computed and the script was told, oldest first."""
        return list(self._reads)

    def hint(self) -> str:
        """Explain, in one line, the last value the script was told; empty if it was told none.

        For the reader of an exception that the answer may have caused.
        """
        if not self._reads:
            return ""
        read = self._reads[-1]
        where = read.where or "The script"
        if read.kind == "zeros":
            return f"{where} copied GPU values to the CPU: zeros, as nothing is computed on the ghost."
        told = f"{read.answer} elements" if read.kind == "count" else repr(read.answer)
        return (
            f"{where} read a GPU value and was told {told}, as nothing is computed on the ghost; "
            f"--values {read.kind}=… chooses another answer."
        )

    def stepped(self) -> None:
        """Note that a training step has ended: no loop over GPU values is endless so far."""
        self._stand_ins.clear()

    def assume(self, kind: str, answer: Number, text: str) -> None:
        """Note that the script was told ``answer``: once per line and text, and in ``last_reads``."""
        where = user_line() or self._fallback_where()
        self._reads.append(Read(where, kind, answer))
        if (where, text) not in self._noted:
            self._noted.add((where, text))
            self._note(Provenance.ASSUMED, text, where, sizes=kind == "count")

    def tell(self, tensor: torch.Tensor, known: Known | None) -> Number | complex:
        """Answer a read of one element of ``tensor``, of which ``known`` is what is known.

        Raises:
            TargetError: one line has asked for unknown values without end.
        """
        if known is None:
            return self._stand_in(tensor)
        if known.basis is not Basis.FILLED:
            kind = "bool" if known.basis is Basis.FINITE or not known.value else "all"
            self.assume(kind, known.value, _TOLD[known.basis].format(answer=known.value))
        return known.value

    def _stand_in(self, tensor: torch.Tensor) -> Number | complex:
        kind, answer = self.stand_in(tensor.dtype)
        text = (
            f"The script read a GPU value; nothing is computed on the ghost, so it was told {answer}. "
            f"Choose another with --values {kind}=…."
        )
        self.assume(kind, answer, text)
        where = self._reads[-1].where
        self._stand_ins[where] += 1
        if self._stand_ins[where] >= _PATIENCE:
            self._stand_ins.clear()
            raise TargetError(
                f"{where} has read GPU values {_PATIENCE:,} times without a training step and was told "
                f"{answer} each time, as nothing is computed on the ghost. If the loop waits for a value, "
                f"choose one that ends it with --values {kind}=…."
            )
        return complex(answer) if tensor.is_complex() else answer

    def stand_in(self, dtype: torch.dtype) -> tuple[str, Number]:
        """Return what kind of number a dtype holds, and the stand-in for it."""
        if dtype == torch.bool:
            return "bool", self.choices.truth
        if dtype.is_floating_point or dtype.is_complex:
            return "float", self.choices.number
        return "int", self.choices.integer

    @contextmanager
    def prepared(self, *answers: Number) -> Iterator[list[Number]]:
        """Answer this thread's next reads of one element, made inside an op of PyTorch's, with ``answers``.

        Yields the answers not yet given.
        """
        outer = getattr(self._thread, "answers", [])
        unread = self._thread.answers = list(answers)
        try:
            yield unread
        finally:
            self._thread.answers = outer

    def next_prepared(self) -> Number | None:
        """Take the next prepared answer of this thread, if there is one."""
        answers: list[Number] = getattr(self._thread, "answers", [])
        return answers.pop(0) if answers else None

    @property
    def counting(self) -> bool:
        """Whether the ghost itself is answering this thread's small copies (``sizes.py``)."""
        return getattr(self._thread, "counting", False)

    @contextmanager
    def while_counting(self) -> Iterator[None]:
        """Leave this thread's reads of one element to the ghost."""
        self._thread.counting = True
        try:
            yield
        finally:
            self._thread.counting = False
