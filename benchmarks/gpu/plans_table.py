"""Render the result of plans.py as Markdown."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from measuring import table_head, table_line

COLUMNS = (
    *("case", "budget", "plan", "allocated: predicted", "counted", "diff.", "reserved"),
    *("step, ms", "ratio", "predicted", "losses"),
)


def markdown(result: Mapping[str, Any]) -> str:
    """Return the table for one card."""
    rehearsal = result["machine"] == "rehearsal"
    first = f"{result['card']}, driver {result['driver'] or 'unknown'}, torch {result['torch']}"
    lines = [
        f"# {'REHEARSAL, nothing was measured: ' * rehearsal}{first}",
        "",
        f"memfit {result['memfit']}, {result['day']}. Bytes that PyTorch counted, and the difference from",
        "the plan's figure. A step's time is the median of each run, and of these the median; its ratio is",
        "to the runs as written. Budgets are shares of what the script needs as written.",
        "",
        table_head(COLUMNS, "lrlrrrrrrrl"),
    ]
    notes: list[str] = []
    for name, case in result.get("cases", {}).items():
        lines += _rows(name, case)
        notes += _notes(name, case)
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def _kinds(case: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the runs as written and under plans that have ended as they should."""
    kinds = {name: kind for name, kind in case.items() if isinstance(kind, dict)}
    return {
        name: {**kind, "runs": [run for run in kind["runs"] if run["code"] == 0]}
        for name, kind in kinds.items()
    }


def _rows(name: str, case: Mapping[str, Any]) -> Iterator[str]:
    if case["status"] != "done":
        yield table_line((name, f"{case['status']}: {case['why']}", *[""] * (len(COLUMNS) - 2)))
    kinds = _kinds(case)
    written = kinds.get("as written", {"runs": []})["runs"]
    for budget, kind in kinds.items():
        runs = kind["runs"]
        if not runs:
            continue
        counted = sorted({run["peaks"]["allocated"] for run in runs if "allocated" in run["peaks"]})
        reserved = sorted({run["peaks"]["reserved"] for run in runs if "reserved" in run["peaks"]})
        took, alone = _median(runs), _median(written)
        cells = (
            name,
            budget,
            kind["plan"],
            f"{kind['predicted']:,}",
            _each(counted, ","),
            _each([each - kind["predicted"] for each in counted], "+,"),
            _each(reserved, ","),
            "" if took is None else f"{1000 * took:.1f}",
            f"{took / alone:.3f}" if took and alone else "",
            f"{kind['time']:.3f}",
            "" if budget == "as written" else _losses(written, runs),
        )
        yield table_line(cells)


def _each(figures: Sequence[int], form: str) -> str:
    return " or ".join(format(figure, form) if figure else "0" for figure in figures)


def _median(runs: Sequence[Mapping[str, Any]]) -> float | None:
    medians = [run["median"] for run in runs if run["median"]]
    return statistics.median(medians) if medians else None


def _losses(written: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> str:
    """Compare the printed losses of the first runs, and say whether runs of one kind agree."""
    if not written:
        return ""
    repeats = all(run["losses"] == kind[0]["losses"] for kind in (written, runs) for run in kind)
    one, other = written[0]["losses"], runs[0]["losses"]
    if not one or len(one) != len(other):
        return f"{len(one)} and {len(other)} printed"
    if one == other:
        return "equal" if repeats else "equal; other runs differ"
    differing = [at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]]
    most = max(abs(float(one[at]) - float(other[at])) for at in differing)
    text = f"differ by {most:.4g} at most, first at step {differing[0]}"
    return text if repeats else f"{text}; repeated runs differ as well"


def _notes(name: str, case: Mapping[str, Any]) -> Iterator[str]:
    for budget, kind in _kinds(case).items():
        refused = dict.fromkeys(line for run in kind["runs"] for line in run["said"] if "NOT APPLIED" in line)
        yield from (f"- {name}, {budget}: {line}" for line in refused)
