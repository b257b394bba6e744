"""Where the time of a training step goes: the host and the GPU's streams on one axis of time, and tables.

    host      ▇▇▇▇▇▇▇▇▇▇▇▇▁▁▁▁▇▇▇▇▇▇▇▇    by phase
    stream 0  ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇    by kind of kernel
    stream 7          ▇▇▇▇▇▇▇▇

A step has thousands of kernels. What is drawn is a bar for each of ``_COLUMNS`` parts of it: in the colour of
what most of the part is spent on, and as high as the share of it that is busy.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

from memfit.analysis.fold_module_paths import fold_module_paths
from memfit.records import DryRun, Phase, Trace, WholeStep
from memfit.report.html.page_text_table import PageTextTable
from memfit.report.html.static_page_parts import ledger_html
from memfit.report.terminal.layout import ReportTable, TableCell, TableRow
from memfit.report.terminal.step_time import name_of_kind, step_time_lines
from memfit.timing.kernel_work import work_of
from memfit.timing.step_time import SimulatedStep, simulated_step_of_trace
from memfit.units import format_seconds

_COLUMNS = 1000
_LEVELS = 4
"""Heights of bars."""
_COLOURS = 7
"""Kinds with a colour of their own, longest first; the others share one."""
_MOST_STREAMS, _MOST_ROWS = 6, 12
_OTHERS = "the rest"
_OUTSIDE = "(outside modules)"


@dataclass(frozen=True, slots=True)
class _Lane:
    """A row of the chart: what keeps the host or a stream busy, and when."""

    name: str
    begin: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]
    names: Sequence[str]
    """Of what each piece of work is."""


def step_section_html(trace: Trace, summary: DryRun, words: PageTextTable) -> str:
    """Return the section about the time of a step; empty for a run that is not on the ghost."""
    time = summary.step_time
    lines = list(step_time_lines(time, summary.step_time_unknown))
    simulated = None if time is None else simulated_step_of_trace(trace)
    parts = [f"<p>{words.html(line.strip())}</p>" for line in lines]
    if time is not None and simulated is not None and trace.step is not None:
        kinds = [name_of_kind(work_of(operation).kind) for operation in trace.step.operations]
        parts += _chart(trace, trace.step, simulated, kinds, time.host_basis)
        parts += _tables(trace, trace.step, simulated, kinds, words)
    if not parts:
        return ""
    return (
        '<section aria-labelledby="h-step" id="s-step"><div class="bar">'
        f'<h2 id="h-step">Where the time of a step goes</h2></div>{"".join(parts)}</section>'
    )


# ---- the chart --------------------------------------------------------------------------------------------


def _chart(
    trace: Trace, step: WholeStep, simulated: SimulatedStep, kinds: Sequence[str], host_basis: str
) -> Iterator[str]:
    """Yield the rows of the chart, its axis and its legend."""
    whole = simulated.timeline.seconds
    host, *streams = _lanes(trace, step, simulated, kinds)
    ranks = _longest_first((name, each.seconds[n]) for each in streams for n, name in enumerate(each.names))
    colours = {name: f'data-kind="{min(number, _COLOURS)}"' for number, name in enumerate(ranks)}
    phases = {str(phase): f'data-phase="{phase}"' for phase in Phase if phase in host.names}
    yield '<div class="lanes">'
    for lane in (host, *streams):
        yield _lane_html(lane, whole, phases if lane is host else colours)
    ticks = "".join(f"<span>{format_seconds(whole * share / 4) if share else 0}</span>" for share in range(5))
    yield f'<span></span><p class="ticks">{ticks}</p></div>'
    named = dict(list(colours.items())[:_COLOURS]) | (
        {_OTHERS: f'data-kind="{_COLOURS}"'} if len(ranks) > _COLOURS else {}
    )
    for what, keys in (("host", phases), ("GPU", named)):
        items = "".join(f"<span><i {key}></i>{escape(name)}</span>" for name, key in keys.items())
        yield f'<p class="key legend"><span>{what}:</span>{items}</p>'
    yield (
        f'<p class="hint">One step, simulated. A bar is {format_seconds(whole / _COLUMNS)} wide: its colour '
        "says what takes most of that, its height which share is busy. The host's seconds are "
        f"{host_basis}.</p>"
    )


def _lanes(trace: Trace, step: WholeStep, simulated: SimulatedStep, kinds: Sequence[str]) -> Iterator[_Lane]:
    """Yield the host's row, and those of the streams that are busiest, in order of their numbers.

    Where the host never waits, nothing says how far ahead it is: it is drawn from the beginning on.
    """
    queue, timeline = simulated.queue, simulated.timeline
    issue = np.array([each.issue for each in queue])
    begin = np.array(timeline.issued) - issue
    if begin[0] < 0 and not any(each.waits for each in queue):
        begin -= begin[0]
    yield _Lane("host", begin, issue, [trace.labels[label].phase for label in step.labels])
    starts, seconds = np.array(timeline.starts), np.array([each.seconds for each in queue])
    names = np.array([kinds[number] for number in step.order])
    streams = np.array([each.stream for each in queue])
    busiest = sorted(timeline.busy, key=lambda stream: -timeline.busy[stream])[:_MOST_STREAMS]
    for stream in sorted(busiest):
        own = (streams == stream) & (seconds > 0)
        yield _Lane(f"stream {stream}", starts[own], seconds[own], names[own].tolist())


def _lane_html(lane: _Lane, whole: float, attributes: dict[str, str]) -> str:
    """Return a row: its name, how long it is busy, and a path for each kind of work."""
    paths: defaultdict[str, str] = defaultdict(str)
    found = list(dict.fromkeys(lane.names))
    for begin, width, number, level in _bars(lane, found, whole):
        paths[found[number]] += f"M{begin} {_LEVELS}v-{level}h{width}v{level}z"
    busy = f"{lane.name}: busy for {format_seconds(lane.seconds.sum())} of {format_seconds(whole)}"
    drawn = "".join(
        f'<path {attributes[name]} d="{path}"><title>{escape(name)}</title></path>'
        for name, path in paths.items()
    )
    return (
        f"<span>{lane.name} <small>{lane.seconds.sum() / whole:.0%}</small></span>"
        f'<svg viewBox="0 0 {_COLUMNS} {_LEVELS}" preserveAspectRatio="none" role="img" aria-label="{busy}">'
        f"{drawn}</svg>"
    )


def _bars(lane: _Lane, found: Sequence[str], whole: float) -> Iterator[tuple[int, int, int, int]]:
    """Yield where each bar begins, its width, which of the names it has, and its height.

    Steps follow each other: what is before the step or after it is part of the step before or after.
    """
    number = np.array([found.index(name) for name in lane.names])
    edges = np.linspace(0.0, whole, _COLUMNS + 1)
    share = np.zeros((len(found), _COLUMNS))
    begin = lane.begin % whole
    for shift in (0.0, -whole):
        for each in range(len(found)):
            own = np.flatnonzero(number == each)
            own = own[np.argsort(begin[own], kind="stable")]
            ends = np.stack((begin[own], begin[own] + lane.seconds[own]), axis=1).reshape(-1) + shift
            sums = np.repeat(np.cumsum(lane.seconds[own]), 2)
            sums[::2] -= lane.seconds[own]
            share[each] += np.diff(np.interp(edges, ends, sums)) * (_COLUMNS / whole)
    most = share.argmax(axis=0)
    level = np.minimum(np.ceil(share.sum(axis=0) * _LEVELS - _NOTHING), _LEVELS).astype(np.int64)
    most[level == 0] = 0
    changes = np.flatnonzero((np.diff(most) != 0) | (np.diff(level) != 0)) + 1
    for first, last in zip([0, *changes.tolist()], [*changes.tolist(), _COLUMNS], strict=True):
        if level[first]:
            yield first, last - first, int(most[first]), int(level[first])


_NOTHING = 0.02
"""Of a level: what is not drawn."""


# ---- the tables -------------------------------------------------------------------------------------------


def _tables(
    trace: Trace, step: WholeStep, simulated: SimulatedStep, kinds: Sequence[str], words: PageTextTable
) -> Iterator[str]:
    """Yield the tables of the GPU's time by kind of kernel and by module."""
    paths = [trace.labels[label].module for label in step.labels]
    known = sorted(set(paths) - {""})
    folded = dict(zip(known, fold_module_paths(known), strict=True)) | {"": _OUTSIDE}
    names = {
        "By kind of kernel": [kinds[number] for number in step.order],
        "By module, with its backward": [folded[path] for path in paths],
    }
    yield '<div class="pair">'
    for caption, each in names.items():
        yield f"<div>{ledger_html('times', caption, _table(step, simulated, each, words), words)}</div>"
    yield (
        '</div><p class="hint">Predicted seconds of kernels. In nine cases of ten, the real ones are in the '
        "range.</p>"
    )


def _table(
    step: WholeStep, simulated: SimulatedStep, names: Iterable[str], words: PageTextTable
) -> ReportTable:
    """Return a row for each name, the longest first: seconds, their range, and what most of them rest on."""
    seconds: defaultdict[str, float] = defaultdict(float)
    off: defaultdict[str, float] = defaultdict(float)
    bases: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    pairs = [(name, simulated.times[number]) for name, number in zip(names, step.order, strict=True)]
    kept = set(_longest_first((name, time.seconds) for name, time in pairs)[:_MOST_ROWS])
    for name, time in pairs:
        row = name if name in kept else _OTHERS
        seconds[row] += time.seconds
        off[row] += time.seconds * time.spread
        bases[row][time.basis] += time.seconds
    total = sum(seconds.values())
    rows = [
        TableRow(
            (
                TableCell(words.shown(row)),
                TableCell(format_seconds(sums)),
                TableCell(f"{sums / total:.1%}"),
                TableCell(_between(sums, off[row] / sums)),
                TableCell(max(bases[row], key=bases[row].__getitem__)),
            )
        )
        for row, sums in sorted(seconds.items(), key=lambda each: (each[0] == _OTHERS, -each[1]))
        if sums
    ]
    return ReportTable(("", "time", "share", "range", "rests on"), (), rows)


def _between(seconds: float, spread: float) -> str:
    return f"{format_seconds(seconds / (1 + spread))} to {format_seconds(seconds * (1 + spread))}"


def _longest_first(parts: Iterable[tuple[str, float]]) -> list[str]:
    """Return the names of parts, those with the most seconds first."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, seconds in parts:
        sums[name] += float(seconds)
    return sorted(sums, key=lambda name: -sums[name])
