"""Compare the results of operators.py operator by operator, and render them as Markdown."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from measuring import table, table_head, table_line

FIGURES = ("peak", "left", "requested_peak", "requested_left", "requests")
COLUMNS = ("operator", "samples", *(name.replace("_", " ") for name in FIGURES), "largest")
OUTCOMES: Mapping[str, str] = {
    "equal": "every sample equal to the byte, before and after rounding, and in the number of requests",
    "differs": "a sample that reads no value from the GPU differs",
    "reads values": "only samples differ whose sizes depend on values, which the ghost assumes",
    "other samples": "the two sides did not create the same samples",
    "both raise": "an error on both sides; the samples without one are equal",
    "card raises": "an error on the card only",
    "ghost raises": "an error on the ghost only",
    "not run": "a side has no result: time limit, or the process died",
}
SHOWN = 200
"""Largest number of operators shown per table; the JSON file lists all."""


@dataclass(frozen=True)
class Comparison:
    """One operator on the card and on the ghost."""

    key: str
    outcome: str
    """A key of ``OUTCOMES``."""
    differing: int = 0
    """Samples that differ."""
    samples: int = 0
    index: int = 0
    """The sample with the largest difference."""
    largest: int = 0
    """Its difference, in bytes."""
    text: str = ""


def compare(key: str, card: Mapping[str, Any], ghost: Mapping[str, Any]) -> Comparison:
    """Compare two results of one operator; either may be empty."""
    if "samples" not in card or "samples" not in ghost:
        return _without_samples(key, card, ghost)
    ours, theirs = ghost["samples"], card["samples"]
    if [row.get("sample") for row in ours] != [row.get("sample") for row in theirs]:
        return Comparison(key, "other samples")
    differs = {
        i: difference(a, b) for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if _unequal(a, b)
    }
    read = {i for i, row in enumerate(ours) if row.get("reads")}
    raised = {"card": _error(theirs), "ghost": _error(ours)}
    one_sided = [side for i, row in enumerate(theirs) if (side := _one_sided(row, ours[i]))]
    outcome = "both raise" if raised["card"] else "equal"
    counted = differs
    if one_sided:
        outcome = f"{one_sided[0]} raises"
    elif set(differs) - read:
        outcome, counted = "differs", {i: size for i, size in differs.items() if i not in read}
    elif differs:
        outcome = "reads values"
    worst = max(counted, key=lambda i: abs(counted[i]), default=0)
    text = "; ".join(f"{side}: {error}" for side, error in raised.items() if error)
    return Comparison(key, outcome, len(counted), len(ours), worst, counted.get(worst, 0), text)


def _without_samples(key: str, card: Mapping[str, Any], ghost: Mapping[str, Any]) -> Comparison:
    text = "; ".join(
        f"{side}: {found.get('error') or found.get('died') or 'no time left'}"
        for side, found in (("card", card), ("ghost", ghost))
        if "samples" not in found
    )
    errors = [side for side, found in (("card", card), ("ghost", ghost)) if "error" in found]
    missing = [found for found in (card, ghost) if "error" not in found and "samples" not in found]
    if missing:
        return Comparison(key, "not run", text=text)
    return Comparison(key, "both raise" if len(errors) > 1 else f"{errors[0]} raises", text=text)


def _unequal(card: Mapping[str, Any], ghost: Mapping[str, Any]) -> bool:
    if "error" in card and "error" in ghost:
        return False
    return any(card[name] != ghost[name] for name in FIGURES)


def _error(rows: Sequence[Mapping[str, Any]]) -> str:
    return next((row["error"] for row in rows if "error" in row), "")


def _one_sided(card: Mapping[str, Any], ghost: Mapping[str, Any]) -> str:
    if ("error" in card) == ("error" in ghost):
        return ""
    return "card" if "error" in card else "ghost"


def difference(card: Mapping[str, Any], ghost: Mapping[str, Any]) -> int:
    """Return the ghost's figure minus the card's, for the figure in bytes that differs most."""
    return max((ghost[name] - card[name] for name in FIGURES[:4]), key=abs)


def markdown(result: Mapping[str, Any]) -> str:
    """Return the report of one card."""
    found = [
        compare(key, result["card"].get(key, {}), result["ghost"].get(key, {})) for key in result["keys"]
    ]
    kinds = list(dict.fromkeys(_kind(row) for row in found))
    counts = Counter((row.outcome, _kind(row)) for row in found)
    rehearsal = "REHEARSAL, nothing was measured: " * (result["machine"] == "rehearsal")
    lines = [
        (
            f"# {rehearsal}operators on {result['name']}, driver {result['driver'] or 'unknown'}, "
            f"torch {result['torch']}"
        ),
        "",
        (
            f"memfit {result['memfit']}, {result['day']}; the ghost simulates a {result['profile']}. At most "
            f"{result['inputs']} samples per operator of PyTorch's database; `larger` are calls of memfit's "
            f"own. {result['seconds']} s."
        ),
        "",
        table(
            ("operators", *kinds, ""),
            f"l{'r' * len(kinds)}l",
            ((name, *(counts[name, kind] for kind in kinds), meaning) for name, meaning in OUTCOMES.items()),
        ),
    ]
    for outcome in ("differs", "reads values"):
        lines += _differences(outcome, found, result)
    for outcome in ("card raises", "ghost raises", "other samples", "both raise", "not run"):
        rows = [row for row in found if row.outcome == outcome]
        if rows:
            lines += ["", f"## {outcome}", "", *(f"- {row.key}: {row.text}" for row in rows[:SHOWN])]
            lines += [f"- and {len(rows) - SHOWN} more"] * (len(rows) > SHOWN)
    return "\n".join(lines) + "\n"


def _kind(row: Comparison) -> str:
    return row.key.split(" ", 1)[0]


def _differences(outcome: str, found: Sequence[Comparison], result: Mapping[str, Any]) -> list[str]:
    rows = sorted((row for row in found if row.outcome == outcome), key=lambda row: -abs(row.largest))
    if not rows:
        return []
    lines = [
        "",
        f"## {outcome}",
        "",
        "In bytes, card / ghost, of the sample with the largest difference. Requested: before rounding.",
        "",
        table_head(COLUMNS, "lrrrrrrr"),
    ]
    for row in rows[:SHOWN]:
        card, ghost = (result[side][row.key]["samples"][row.index] for side in ("card", "ghost"))
        cells = [
            f"{card[name]:,}" if card[name] == ghost[name] else f"{card[name]:,} / {ghost[name]:,}"
            for name in FIGURES
        ]
        lines.append(table_line((row.key, f"{row.differing} of {row.samples}", *cells, f"{row.largest:+,}")))
    return [*lines, *[f"\nAnd {len(rows) - SHOWN} more."] * (len(rows) > SHOWN)]
