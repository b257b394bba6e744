"""The chart of runs as SVG: the time of a step against the memory that it needs; points link to rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from memfit.records import Figure
from memfit.units import format_gib, unit_for_table


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """A run in the chart."""

    number: int
    """Of its row, ``plan-NUMBER``."""
    kind: str
    """Its class in the style sheet."""
    words: str
    """What ran."""
    needs: Figure
    time: float
    """Of a step, relative to the script as written."""
    name: str = ""
    """What follows its number."""


_WIDTH, _HEIGHT = 960, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 24, 34, 50
_TICKS = 6
_ROOM = 0.06
"""Share of an axis beside the outermost points."""
_APART = 15
"""Pixels between two numbers of points, at least: others are left out."""

_LATE = 0.8
"""Share of the width from which words stand before their point."""


class _Axis:
    """Places values on a line of pixels."""

    def __init__(self, values: Sequence[float], least: float, start: float, end: float) -> None:
        extent = max(max(values) - min(values), least)
        self.low, self.high = min(values) - _ROOM * extent, min(values) + (1 + _ROOM) * extent
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return round values to be named."""
        rough = (self.high - self.low) / _TICKS
        power = 10.0 ** floor(log10(rough))
        step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
        first, last = ceil(self.low / step), floor(self.high / step)
        return [round(step * number, 9) for number in range(first, last + 1)]


def time_memory_chart_svg(points: Sequence[ChartPoint], limit: tuple[str, int] | None) -> str:
    """Return the chart.

    Args:
        points: in the order in which they are drawn.
        limit: a name, and bytes at which a line is drawn.
    """
    drawn = [limit] if limit is not None else []
    sizes = [*(size for _, size in drawn), *(each.needs.bytes for each in points)]
    unit = unit_for_table(max(sizes))
    scaled = [each / unit.bytes for each in sizes]
    memory = _Axis(scaled, 0.02 * max(scaled), _LEFT, _WIDTH - _RIGHT)
    time = _Axis([each.time for each in points], 0.02, _HEIGHT - _BOTTOM, _TOP)
    low, top = _HEIGHT - _BOTTOM, _TOP - 8
    parts = [*_grid(memory, time, unit.name)]
    for name, size in drawn:
        x = memory.at(size / unit.bytes)
        parts += [
            f'<line class="budget" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{low}"/>',
            f'<text class="budget{_before(x)}" x="{x:.1f}" y="{top - 6}">{escape(name)} ',
            f"{format_gib(size)}</text>",
        ]
    parts += _points(points, memory, time, unit.bytes)
    return (
        f'<svg class="plans" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Time of a step against '
        f'the memory that it needs; the table has the figures">{"".join(parts)}</svg>'
    )


def _grid(memory: _Axis, time: _Axis, unit: str) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in memory.ticks():
        x = memory.at(value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}">{value:,g}</text>'
    for value in time.ticks():
        y = time.at(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="times" x="{_LEFT - 8}" y="{y + 4:.1f}">{value:g}x</text>'
    yield f'<text class="axis-name" x="{right}" y="{_HEIGHT - 10}">needs, {unit} of the process →</text>'
    turned = f"rotate(-90 14 {bottom})"
    yield f'<text class="time-name" x="14" y="{bottom}" transform="{turned}">time of a step →</text>'


def _before(x: float) -> str:
    """Return the class of a text that stands before its point, because there is no room after it."""
    return " before" * (x > _LATE * _WIDTH)


def _points(points: Sequence[ChartPoint], memory: _Axis, time: _Axis, unit: int) -> Iterator[str]:
    spots = [(each, memory.at(each.needs.bytes / unit), time.at(each.time)) for each in points]
    named: list[tuple[float, float]] = []
    for each, x, y in reversed(spots):
        if all(abs(x - other) > _APART or abs(y - beside) > _APART for other, beside in named):
            named.append((x, y))
            aside = -10 if _before(x) else 10
            yield f'<text class="name{_before(x)}" x="{x + aside:.1f}" y="{y - 7:.1f}">'
            yield f"{each.number}{f' {each.name}' * bool(each.name)}</text>"
    for each, x, y in spots:
        figures = f"{format_gib(each.needs.bytes)} {each.needs.provenance}, {each.time:.3f}x"
        yield (
            f'<a href="#plan-{each.number}"><circle class="{each.kind}" '
            f'cx="{x:.1f}" cy="{y:.1f}" r="{7 if each.kind == "chosen" else 5}">'
            f"<title>{escape(f'{each.words}: {figures}')}</title></circle></a>"
        )
