"""The option ``--values float=0.5,nonzero=25%,heads.py:120=256``: what GPU reads return on the ghost.

    key                  chosen                                                            default
    float  int  bool     an element of that type                                           1.0  1  False
    all                  ``all()`` over a tensor, ``torch.equal``: what checks use         True
    copy                 every number of a copy of many elements to the CPU                0
    count                the number of elements that ``nonzero``, ``unique``, ... find     upper
    nonzero  unique ...  the same, for one operator                                        count
    routing              the rows that an expert-parallel rank receives                    count
    FILE:LINE            whatever is read by that line, or by what it calls                the keys above

The last key that applies is used; of lines, the innermost.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

from memfit.errors import UsageError

Kind = Literal["float", "int", "bool", "all", "copy", "count"]
Count = Literal["upper", "even"] | float | int
"""A number of elements found: all that are possible, a share of those in (0, 1], or a number; of rows that
ranks send each other, also an even share."""

OPERATORS = (
    "nonzero",
    "unique",
    "unique_consecutive",
    "coalesce",
    "mode",
    "repeat_interleave",
    "one_hot",
    "bincount",
    "routing",
)
"""The operators whose sizes can be set on their own. Masks, ``where`` and ``masked_select`` use nonzero;
``routing`` is the exchange of tokens between ranks that hold different experts."""

_DEFAULTS: Mapping[Kind, bool | int | float | str] = {
    "float": 1.0,
    "int": 1,  # not 0: scripts divide by counts
    "bool": False,
    "all": True,
    "copy": 0,
    "count": "upper",
}
_PLACE = re.compile(r".+:[0-9]+")
_EXAMPLE = (
    f"The keys are {', '.join(_DEFAULTS)}, the operators {', '.join(OPERATORS)}, and FILE:LINE. The "
    "operator 'nonzero' also covers boolean masks, 'where' and 'masked_select'. "
    "Separate pairs with commas, for example float=0.5,nonzero=25%."
)


class ChosenGpuValue(NamedTuple):
    """The value for one read."""

    value: Any
    given: str
    """The pair that the user gave for it, as in ``nonzero=25%``; empty for memfit's own choice."""


@dataclass(frozen=True, slots=True)
class GpuValueOptions:
    """The values a script reads from the GPU, which the ghost does not compute."""

    given: Mapping[str, str] = field(default_factory=dict)
    """The pairs that the user gave: a kind, an operator or ``FILE:LINE``, and the value as text."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the command line's ``--values``; keys that are not given keep their defaults.

        Args:
            text: ``key=value`` pairs separated by commas. A count with a decimal point or a percent sign is
                a share (``1.0`` and ``100%`` are all elements), one without is a number.

        >>> GpuValueOptions.parse("float=0.5, nonzero=25%").given
        {'float': '0.5', 'nonzero': '25%'}
        """
        given: dict[str, str] = {}
        for pair in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = (piece.strip() for piece in pair.partition("="))
            if key in given:
                raise UsageError(f"values {text}: {key}= is given twice. Give it once.")
            if key not in _DEFAULTS and key not in OPERATORS and not _PLACE.fullmatch(key):
                raise UsageError(f"values {text}: unknown key {key!r}. {_EXAMPLE}")
            unfit = value == "even" and (key in _DEFAULTS or (key in OPERATORS and key != "routing"))
            if unfit or all(_PARSERS[kind](value) is None for kind in _kinds(key)):
                raise UsageError(f"values {pair}: {value!r} is not {_wanted(key)}.")
            given[key] = value
        return cls(given)

    @property
    def places(self) -> tuple[str, ...]:
        """The keys that name a line."""
        return tuple(key for key in self.given if _PLACE.fullmatch(key))

    def choose(self, kind: Kind, operator: str = "") -> ChosenGpuValue:
        """Return the value for a read for which the user gave no line; ``operator`` finds a count.

        >>> options = GpuValueOptions.parse("count=0.5,unique=3")
        >>> options.choose("count", "unique"), options.choose("count", "mode").value
        (ChosenGpuValue(value=3, given='unique=3'), 0.5)
        """
        return self._given(kind, operator) or self._given(kind, kind) or ChosenGpuValue(_DEFAULTS[kind], "")

    def at_line(self, kind: Kind, lines: Iterable[tuple[str, int]]) -> ChosenGpuValue | None:
        """Return the value that the user gave for the innermost of these lines, or None.

        >>> options = GpuValueOptions.parse("heads.py:120=256")
        >>> options.at_line("count", [("/lib/heads.py", 120)])
        ChosenGpuValue(value=256, given='heads.py:120=256')
        >>> options.at_line("bool", [("/lib/heads.py", 120)])  # None: 256 is no boolean
        """
        named = (place for line in lines for place in self.places if _names(place, *line))
        return next(filter(None, (self._given(kind, place) for place in named)), None)

    def _given(self, kind: Kind, key: str) -> ChosenGpuValue | None:
        """Return the value of a key for a kind of read; None if it was not given, or is not of that kind."""
        value = _PARSERS[kind](self.given[key]) if key in self.given else None
        return None if value is None else ChosenGpuValue(value, f"{key}={self.given[key]}")


def chosen_element_count(count: Count, upper: int, even: int | None = None) -> int:
    """Return the number of elements found, of at most ``upper``; ``even`` is the even share, if there is one.

    >>> (
    ...     chosen_element_count("upper", 10),
    ...     chosen_element_count(0.25, 10),
    ...     chosen_element_count(4, 3),
    ...     chosen_element_count("even", 10, 2),
    ... )
    (10, 3, 3, 2)
    """
    match count:
        case "upper":
            return upper
        case "even":
            return upper if even is None else even
        case float(share):
            return math.ceil(upper * share)
        case number:
            return min(int(number), upper)


def _names(place: str, file: str, line: int) -> bool:
    """Return whether ``FILE:LINE`` names a line; FILE may be the end of a path."""
    path, _, number = place.rpartition(":")
    return int(number) == line and f"{os.sep}{file}".endswith(f"{os.sep}{os.path.normpath(path)}")


def _kinds(key: str) -> tuple[Kind, ...]:
    """Return the kinds of reads that a key applies to."""
    if key in OPERATORS:
        return ("count",)
    return tuple(kind for kind in _DEFAULTS if kind == key) or tuple(_DEFAULTS)


def _wanted(key: str) -> str:
    """Return what a key's value must be, for an error."""
    kinds = _kinds(key)
    if len(kinds) > 1:
        return "a number, a share such as 25%, true or false"
    return _WANTED[kinds[0]]


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _integer(value: str) -> int | None:
    try:
        return int(value)
    except ValueError:
        return None


def _truth(value: str) -> bool | None:
    return {"true": True, "false": False}.get(value.lower())


def _count(value: str) -> Count | None:
    if value == "upper":
        return "upper"
    if value == "even":
        return "even"
    if value.endswith("%"):
        share = _number(value[:-1])
        return share / 100 if share is not None and 0 < share <= 100 else None  # noqa: PLR2004 - percent
    if "." in value:
        share = _number(value)
        return share if share is not None and 0 < share <= 1 else None
    number = _integer(value)
    return number if number is not None and number >= 0 else None


_PARSERS: Mapping[Kind, Callable[[str], Any]] = {
    "float": _number,
    "int": _integer,
    "bool": _truth,
    "all": _truth,
    "copy": _number,
    "count": _count,
}
_WANTED: Mapping[Kind, str] = {
    "float": "a number",
    "int": "an integer",
    "bool": "true or false",
    "all": "true or false",
    "copy": "a number",
    "count": "a count. Use 'upper', a number of elements, a share of all elements such as 25%, or 'even' "
    "for routing",
}
