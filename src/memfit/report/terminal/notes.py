"""The notes of a run on the terminal: in full those that figures may depend on, and the number of the others.

Notes that differ in their places and numbers alone are one note, with several places and a range of numbers.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from rich.text import Text

from memfit.records import DryRun, Figure, Note, Provenance
from memfit.report.escape_control_characters import escaped
from memfit.report.places_in_words import short_path
from memfit.units import format_bytes

_SHARE = 0.01
"""A note is shown in full if more than this share of the process at its peak may depend on it."""
_MOST = 8
"""Notes shown in full; of those whose effect is known, the largest."""
_LONGEST = 2_000
"""Characters of a note that is printed whole: ``escaped`` would cut three layers with long names."""
_WIDTH = max(map(len, Provenance))
_NUMBER = re.compile(r"(?<=\s)[0-9][0-9,]*(?=\s)")


def note_lines(result: DryRun, *, full: bool, hints: bool) -> Iterator[Text]:
    """Yield the notes of a result as lines.

    Args:
        result: a run.
        full: list every note.
        hints: name the option that lists them; without it, the lines name the result's attribute.
    """
    if full:
        yield from _all_lines(result)
        return
    notes = _folded(result.notes)
    effects = {note: _effect(alike, result) for note, alike in notes.items()}
    worth_showing = [note for note in notes if effects[note] > _SHARE * result.peak_process.bytes]
    shown = sorted(worth_showing, key=effects.__getitem__, reverse=True)[:_MOST]
    for note in shown:
        yield Text(f"note ({note.provenance}): {_escaped(note.text)}{_in_places(notes[note])}")
    rest = [note for note in notes if note not in shown]
    if rest:
        yield Text(_count(rest, more=bool(shown), hints=hints), style="dim")


def _folded(notes: Iterable[Note]) -> dict[Note, list[Note]]:
    """Return each note once, with ranges of its numbers and without its place, and all that are like it."""
    alike: dict[Note, list[Note]] = {}
    for note in notes:
        alike.setdefault(replace(note, text=_NUMBER.sub("0", note.text), where=""), []).append(note)
    return {
        replace(members[0], text=_with_ranges([note.text for note in members]), where=""): members
        for members in alike.values()
    }


def _with_ranges(texts: list[str]) -> str:
    """Return texts that differ in numbers alone as one text, with the range of each number.

    >>> _with_ranges(["It found 8 of 10.", "It found 1,024 of 10.", "It found 3 of 10."])
    'It found 3 to 1,024 of 10.'
    """
    numbers = [[int(number.replace(",", "")) for number in _NUMBER.findall(text)] for text in texts]
    ranges = iter([(min(column), max(column)) for column in zip(*numbers, strict=True)])

    def as_range(number: re.Match[str]) -> str:
        least, most = next(ranges)
        return f"{least:,} to {most:,}" if least < most else number[0]

    return _NUMBER.sub(as_range, texts[0])


def _effect(notes: list[Note], result: DryRun) -> float:
    """Return how many bytes of the peak may depend on notes that are alike; infinity if that is unknown.

    Known are sizes set to their upper bounds, and the workspaces whose sizes cuDNN itself gives.
    """
    note = notes[0]
    if not note.sizes:
        return 0
    if note.bound:
        at = {one.where for one in notes}
        return sum(one.bytes for one in result.bounds if one.operator == note.bound and one.where in at)
    if note.workspaces and not note.activations and note.provenance is not Provenance.ASSUMED:
        return sum(term.figure.bytes for term in result.terms if term.name == "workspaces")
    return math.inf


def _count(notes: list[Note], *, more: bool, hints: bool) -> str:
    remarks = sum(note.provenance is Provenance.EXACT for note in notes)
    counts = ((len(notes) - remarks, "assumption"), (remarks, "remark"))
    parts = [f"{count} {word}{'s' * (count != 1)}" for count, word in counts if count]
    if more:
        parts[0] = parts[0].replace(" ", " more ", 1)
    where = f"--notes lists {'it' if len(notes) == 1 else 'them'}" if hints else "see `notes`"
    return f"{' and '.join(parts)}; {where}."


def _all_lines(result: DryRun) -> Iterator[Text]:
    yield from _outside_lines(result)
    notes = _folded(result.notes)
    groups: dict[str, list[Note]] = {
        "Notes that the figures depend on:": [note for note in notes if note.sizes],
        "Assumptions whose effect on the figures is unknown:": [
            note for note in notes if not note.sizes and note.provenance is not Provenance.EXACT
        ],
        "Remarks:": [note for note in notes if not note.sizes and note.provenance is Provenance.EXACT],
    }
    for heading, members in groups.items():
        if members:
            yield Text(heading)
        for note in members:
            yield Text(f"  {note.provenance:<{_WIDTH}}  {_escaped(note.text)}{_in_places(notes[note])}")


def figures_outside_allocator(result: DryRun) -> dict[str, Figure]:
    """Return what is outside PyTorch's allocator, as far as its source is given."""
    figures = {term.name: term.figure for term in result.terms if not term.is_total}
    if (driver := result.device.driver) is not None:
        more = f"{format_bytes(driver.bytes)} that the driver reserves, which nvidia-smi omits"
        figures["in NVML's v1"] = replace(driver, source=f"{more}: {driver.source}")
    return {name: figure for name, figure in figures.items() if figure.bytes and figure.source}


def _outside_lines(result: DryRun) -> Iterator[Text]:
    sourced = figures_outside_allocator(result)
    if sourced:
        yield Text("Outside PyTorch's allocator:")
    for name, figure in sourced.items():
        yield Text(f"  {figure.provenance:<{_WIDTH}}  {name}: {_escaped(figure.source)}")


def _escaped(text: str) -> str:
    return escaped(text, whole=len(text) <= _LONGEST)


def _in_places(notes: list[Note]) -> str:
    """Return the places of notes in parentheses, with the lines of each file together.

    >>> places = ("train.py:10", "model.py:5", "train.py:31")
    >>> _in_places([Note(Provenance.EXACT, "A remark.", place) for place in places])
    '  (3 places: train.py:10, 31; model.py:5)'
    """
    places = list(dict.fromkeys(escaped(short_path(note.where)) for note in notes if note.where))
    lines: dict[str, list[str]] = {}
    for place in places:
        file, colon, line = place.rpartition(":")
        lines.setdefault(file + colon, []).append(line)
    listed = "; ".join(file + ", ".join(numbers) for file, numbers in lines.items())
    count = f"{len(places)} places: " if len(places) > 1 else ""
    return f"  ({count}{listed})" if places else ""
