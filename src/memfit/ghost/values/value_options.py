"""The option ``--values float=0.5,count=0.25``: the values returned for unknown GPU reads."""

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

from memfit.errors import UsageError

Count = Literal["upper"] | float | int

_EXAMPLE = "The keys are float, int, bool, all and count; separate pairs with commas: float=0.5,count=0.25."


@dataclass(frozen=True, slots=True)
class ValueOptions:
    """The values a script reads from the GPU, which the ghost does not compute."""

    number: float = 1.0
    """``float=``: a floating-point element."""
    integer: int = 1
    """``int=``: an integer element. Not 0 by default: scripts divide by counts."""
    truth: bool = False
    """``bool=``: a boolean element: a comparison, ``any()`` over a tensor."""
    all: bool = True
    """``all=``: ``all()`` over a tensor, ``torch.equal``, ``torch.allclose``, as checks use them."""
    count: Count = "upper"
    """``count=``: the number of elements that ``nonzero``, ``unique`` and similar ops find: ``upper`` (the
    largest number possible), a fraction of that in (0, 1], or a number."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the command line's ``--values``; keys that are not given keep their defaults.

        Args:
            text: ``key=value`` pairs separated by commas, with the keys float, int, bool, all and count. A
                count with a decimal point is a fraction (``1.0`` is all elements), one without is a number.

        Raises:
            UsageError: an unknown or repeated key, or a value that is invalid for its key.

        >>> ValueOptions.parse("float=0.5,bool=true,count=0.25")
        ValueOptions(number=0.5, integer=1, truth=True, all=True, count=0.25)
        """
        options, seen = cls(), set()
        for pair in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = (piece.strip() for piece in pair.partition("="))
            if key in seen:
                raise UsageError(f"values {text}: {key}= is given twice. Give it once.")
            seen.add(key)
            match key:
                case "float":
                    options = replace(options, number=_number(pair, value))
                case "int":
                    options = replace(options, integer=_integer(pair, value))
                case "bool":
                    options = replace(options, truth=_truth(pair, value))
                case "all":
                    options = replace(options, all=_truth(pair, value))
                case "count":
                    options = replace(options, count=_count(pair, value))
                case _:
                    raise UsageError(f"values {text}: unknown key {key!r}. {_EXAMPLE}")
        return options

    def count_of(self, upper: int) -> int:
        """Return the number of elements found, of at most ``upper``.

        >>> ValueOptions(count=0.25).count_of(10), ValueOptions(count=4).count_of(3)
        (3, 3)
        """
        match self.count:
            case "upper":
                return upper
            case float(fraction):
                return math.ceil(upper * fraction)
            case number:
                return min(int(number), upper)


def _number(pair: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"values {pair}: {value!r} is not a number. {_EXAMPLE}") from None


def _integer(pair: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"values {pair}: {value!r} is not an integer. {_EXAMPLE}") from None


def _truth(pair: str, value: str) -> bool:
    truths = {"true": True, "false": False}
    if value.lower() not in truths:
        raise UsageError(f"values {pair}: {value!r} is neither true nor false.")
    return truths[value.lower()]


def _count(pair: str, value: str) -> Count:
    if value == "upper":
        return "upper"
    try:
        count = float(value) if "." in value else int(value)
    except ValueError:
        count = None
    if count is None or count < 0 or (isinstance(count, float) and not 0 < count <= 1):
        raise UsageError(
            f"values {pair}: {value!r} is not a count. Use 'upper', a number of elements, or a fraction of "
            "all elements (above 0 and at most 1, for example 0.25)."
        )
    return count
