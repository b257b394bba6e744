"""Values the ghost returns for GPU reads, with the line of each read.

known       the tensor's value, if it is known (``known_values.py``)
prepared    answers to reads that PyTorch makes inside one of its own ops
assumed     otherwise: 1.0, 1 or False, each noted once per line
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from memfit.errors import TargetError
from memfit.ghost.note_callback_protocol import NoteCallback
from memfit.ghost.rank_exchange_protocol import RankExchange
from memfit.ghost.values.dtype_rounding import Number, round_to_dtype
from memfit.ghost.values.known_values import KnownValues
from memfit.ghost.values.tensor_facts import (
    KnownElements,
    KnownValue,
    KnownValueBasis,
    TokenCountBasis,
    tensor_storage_address,
)
from memfit.ghost.values.value_options import OPERATORS, ChosenGpuValue, GpuValueOptions, Kind
from memfit.records import CHECK, FINITE_CHECK, Provenance, StandIn
from memfit.user_lines import frame_locations, innermost_line_of_place, user_line_with_package_line

_MAX_READS = 100_000
"""Assumed values that one line may read without a training step, before its loop counts as endless."""

_READ = "The script read a GPU value."
_NOTHING_COMPUTED = "The ghost computes nothing, so"
_BASIS_NOTES = {
    KnownValueBasis.FINITE: "GPU values are assumed to be finite: the read returned {answer}.",
    KnownValueBasis.CHECKED: "Checks on GPU values are assumed to pass: the read returned {answer}. "
    "--values all=false or bool=true changes this assumption.",
}


@dataclass(frozen=True, slots=True)
class GpuRead:
    """One read of an unknown GPU value, and the value the ghost returned."""

    where: str
    """As of ``user_line_with_package_line``, or the module if Python has no frame."""
    what: str
    """What was read: ``a float``, ``a copy of numbers``, ``the size of nonzero``."""
    key: str
    """The ``--values`` key for all such reads: a kind or an operator; empty if none sets it."""
    answer: Number


class AssumedValues:
    """The answers to the script's GPU reads, and the notes about them.

    ``known`` holds the known values of tensors, and ``ranks`` carries those of small ones between the
    ranks of a job; see ``gpu_reads.install`` for the arguments.
    """

    def __init__(
        self,
        options: GpuValueOptions,
        note: NoteCallback,
        forward_lines: Callable[[], list[tuple[str, int]]],
        fallback_where: Callable[[], str],
        on_stand_in: Callable[[StandIn], None],
        *,
        senders_exist: bool = False,
        ranks: RankExchange | None = None,
    ) -> None:
        self.options = options
        self.ranks = ranks
        self.senders_exist = senders_exist
        self.known = KnownValues()
        self._note = note
        self._forward_lines = forward_lines
        self._fallback_where = fallback_where
        self._on_stand_in = on_stand_in
        self._noted: set[tuple[str, str]] = set()
        self._last: dict[str, GpuRead] = {}  # by what was read, oldest first
        self._used: set[str] = set()
        self._assumed: Counter[str] = Counter()
        self._found: dict[tuple[int, int, int], int] = {}  # by a tensor's place in memory
        self._thread = threading.local()
        self._referenced: tuple[object, ...] = ()

    def keep(self, *objects: object) -> None:
        """Hold references to objects that must live as long as this one."""
        self._referenced = objects

    def last_reads(self) -> list[GpuRead]:
        """Return the last read of each kind of unknown value, oldest first."""
        return list(self._last.values())

    def last_stand_ins(self) -> tuple[StandIn, ...]:
        """Return the last reads, newest first, one of each line.

        For the reader of an exception that one of these values may have caused.
        """
        newest: dict[str, StandIn] = {}
        for read in map(_stand_in, reversed(self._last.values())):
            newest.setdefault(read.key, read)
        return tuple(newest.values())

    def unused(self) -> list[str]:
        """Return the pairs of ``--values`` for an operator or a line that no read has used."""
        specific = (*OPERATORS, *self.options.places)
        pairs = [f"{key}={value}" for key, value in self.options.given.items() if key in specific]
        return [pair for pair in pairs if pair not in self._used]

    def choose(self, kind: Kind, operator: str = "") -> ChosenGpuValue:
        """Return the value for a read that the calling thread is making."""
        chosen = self._chosen_for_line(kind) or self.options.choose(kind, operator)
        self._used.add(chosen.given)
        return chosen

    def _chosen_for_line(self, kind: Kind) -> ChosenGpuValue | None:
        """Return the value that the user gave for a line that led to this read, or None."""
        chosen = self.options.at_line(kind, self._lines()) if self.options.places else None
        if chosen is not None:
            self._used.add(chosen.given)
        return chosen

    def _lines(self) -> list[tuple[str, int]]:
        """Return the lines that led to the calling thread's read: in the backward, also the forward's."""
        lines = list(frame_locations())
        return [*lines, *self._forward_lines()] if _on_another_thread() else lines

    def remember_found(self, tensor: torch.Tensor, found: int) -> None:
        """Remember how many elements of a tensor ``nonzero`` found."""
        self._found[_place_in_memory(tensor)] = found

    def found_in_forward(self, tensor: torch.Tensor) -> int | None:
        """Return what ``nonzero`` found in a mask that the backward of ``x[mask]`` searches again.

        None if it has not been searched. With Python frames of the user's, it is a search of its own.
        """
        if not _on_another_thread() or user_line_with_package_line(frame_locations()):
            return None
        return self._found.get(_place_in_memory(tensor))

    def stepped(self) -> None:
        """Record the end of a training step: no loop over GPU values has been endless so far."""
        self._assumed.clear()

    def assume(
        self, what: str, key: str, answer: Number, text: str, *, sizes: bool = False, bound: str = ""
    ) -> None:
        """Add a read that returned ``answer`` to ``last_reads``, and note it.

        Args:
            what: what was read, as in ``GpuRead``.
            key: as in ``GpuRead``.
            answer: what the read returned.
            text: of the note, which is made once per line and text.
            sizes: as in ``Note``.
            bound: as in ``Note``; such a note is made each time, because its moments are recorded.
        """
        where = user_line_with_package_line(self._lines()) or self._fallback_where()
        self._last.pop(what, None)
        self._last[what] = read = GpuRead(where, what, key, answer)
        self._on_stand_in(_stand_in(read))
        if bound or (where, text) not in self._noted:
            self._noted.add((where, text))
            self._note(Provenance.ASSUMED, text, where, sizes=sizes, bound=bound)

    def answer(self, tensor: torch.Tensor, known: KnownValue | None) -> Number | complex:
        """Answer a read of one element of ``tensor``: its ``known`` value, or an assumed one.

        Raises:
            TargetError: one line keeps reading unknown values in an endless loop.
        """
        if known is None:
            return self._assumed_value(tensor)
        if known.basis is KnownValueBasis.FILLED:
            return known.value
        kind: Kind = "bool" if known.basis is KnownValueBasis.FINITE or not known.value else "all"
        chosen = self._chosen_for_line(kind)
        answer: Number = known.value if chosen is None else chosen.value
        text = self._basis_note(known) if chosen is None else f"{_READ} {explain_gpu_read(chosen, kind)}"
        what = FINITE_CHECK if known.basis is KnownValueBasis.FINITE else CHECK
        self.assume(what, kind, answer, text)
        return answer

    def _basis_note(self, known: KnownValue) -> str:
        """Return what an assumed value rests on."""
        given = [f"{key}={self.options.given[key]}" for key in ("all", "bool") if key in self.options.given]
        if known.basis is KnownValueBasis.CHECKED and given:
            return (
                f"The user chose what checks return (--values {','.join(given)}): one returned {known.value}."
            )
        return _BASIS_NOTES[known.basis].format(answer=known.value)

    def _assumed_value(self, tensor: torch.Tensor) -> Number | complex:
        kind = _kind_of(tensor.dtype)
        chosen = self.choose(kind)
        answer: Number = chosen.value
        what = {"float": "a float", "int": "an integer", "bool": "a boolean"}[kind]
        self.assume(what, kind, answer, f"{_READ} {explain_gpu_read(chosen, kind)}")
        where = self._last[what].where
        self._assumed[where] += 1
        if self._assumed[where] >= _MAX_READS:
            self._assumed.clear()
            raise TargetError(
                f"{where} read GPU values {_MAX_READS:,} times without a training step, probably in an "
                f"endless loop. {_NOTHING_COMPUTED} each read returned {answer}. If the loop waits for "
                f"another value, pass it: --values {kind}=…."
            )
        return complex(answer) if tensor.is_complex() else answer

    def fill_copy(self, source: torch.Tensor, copy: torch.Tensor, known: KnownValue | None) -> None:
        """Fill a copy of many elements on the CPU with the value chosen for them, and note it.

        Known zeros remain, and a value that the copy's dtype cannot hold leaves zeros.
        """
        if known is not None and not known.value:
            return
        boolean = source.dtype == torch.bool
        kind: Kind = "bool" if boolean else "copy"
        chosen = self.choose(kind)
        number = chosen.value if copy.is_complex() else round_to_dtype(chosen.value, copy.dtype)
        if number:
            copy.data.fill_(number)  # bypasses autograd: the copy keeps its history
        answer = chosen._replace(value=chosen.value if boolean else number or 0)
        text = f"The script copied GPU values to the CPU. {explain_gpu_read(answer, kind, 'each of them is')}"
        self.assume(f"a copy of {'booleans' if boolean else 'numbers'}", kind, answer.value, text)

    def note_elements(self, elements: KnownElements) -> None:
        """Note a read of counts by class, which memfit assumed."""
        if elements.routing is TokenCountBasis.SENT:
            total = int(elements.values.sum())
            text = f"The script read how often each class occurs: memfit assumed the {total:,} to be even."
            self.assume("counts by class", "", total, text)

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


def _place_in_memory(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return storage, offset and number of elements; ``data_ptr()`` would count as a way to write to it."""
    return tensor_storage_address(tensor), int(tensor.storage_offset()), tensor.numel()


def _on_another_thread() -> bool:
    """Return whether this is not the script's thread but, as a rule, one of autograd's."""
    return threading.current_thread() is not threading.main_thread()


def _kind_of(dtype: torch.dtype) -> Kind:
    """Return the ``--values`` key for one element of a dtype."""
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point or dtype.is_complex else "int"


def explain_gpu_read(chosen: ChosenGpuValue, key: str, returned: str = "it returned") -> str:
    """Return why a read returned its value, and how to choose another."""
    if chosen.given:
        return f"The user assumes that {returned} {chosen.value} (--values {chosen.given})."
    return (
        f"{_NOTHING_COMPUTED} {returned} {chosen.value}. To choose another value, pass --values {key}=… or, "
        "for one line, FILE:LINE=…."
    )


def _stand_in(read: GpuRead) -> StandIn:
    """Return a read as others report it, with the line, or else the kind, whose value to change."""
    key = read.key and (innermost_line_of_place(read.where) or read.key)
    if isinstance(read.answer, bool):
        other = "false" if read.answer else "true"
    else:
        other = "1" if not read.answer or (read.key in OPERATORS and read.answer != 1) else "0"
    return StandIn(read.where, read.what, str(read.answer), f"{key}={other}" if key else "")
