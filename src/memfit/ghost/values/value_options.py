"""What the user may choose that a script is told: ``--values float=0.5,count=0.25``."""

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

from memfit.errors import UsageError

Count = Literal["upper"] | float | int

_EXAMPLE = "Write float=, int=, bool=, all= or count=, separated by commas, like float=0.5,count=0.25."


@dataclass(frozen=True, slots=True)
class ValueChoices:
    """What a script is told when it reads GPU values that nobody computed."""

    number: float = 1.0
    """``float=``: a floating-point element."""
    integer: int = 1
    """``int=``: an integer element. Not 0: counts are divided by."""
    truth: bool = False
    """``bool=``: a truth: a comparison, ``any()`` over a tensor."""
    all: bool = True
    """``all=``: ``all()`` over a tensor, ``torch.equal``, ``torch.allclose``: what checks are made of."""
    count: Count = "upper"
    """``count=``: how many elements ``nonzero``, ``unique`` and their kin find: ``upper`` (as many as
    there can be), a fraction of that in (0, 1], or a number."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read choices as the command line spells them; what is not named keeps its default.

        Args:
            text: ``key=value`` pairs separated by commas, with the keys float, int, bool, all and count. A
                count with a decimal point is a fraction (``1.0`` is all of them), one without is a number.

        Raises:
            UsageError: an unknown or repeated key, or a value that does not fit its key.

        >>> ValueChoices.parse("float=0.5,bool=true,count=0.25")
        ValueChoices(number=0.5, integer=1, truth=True, all=True, count=0.25)
        """
        choices, seen = cls(), set()
        for pair in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = (piece.strip() for piece in pair.partition("="))
            if key in seen:
                raise UsageError(f"values {text}: {key} is given twice.")
            seen.add(key)
            match key:
                case "float":
                    choices = replace(choices, number=_number(pair, value))
                case "int":
                    choices = replace(choices, integer=_integer(pair, value))
                case "bool":
                    choices = replace(choices, truth=_truth(pair, value))
                case "all":
                    choices = replace(choices, all=_truth(pair, value))
                case "count":
                    choices = replace(choices, count=_count(pair, value))
                case _:
                    raise UsageError(f"values {text}: {key!r} is not something a script reads. {_EXAMPLE}")
        return choices

    def count_of(self, upper: int) -> int:
        """Choose how many are found where there can be at most ``upper``.

        >>> ValueChoices(count=0.25).count_of(10), ValueChoices(count=4).count_of(3)
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
        raise UsageError(f"values {pair}: {value!r} is not a whole number. {_EXAMPLE}") from None


def _truth(pair: str, value: str) -> bool:
    truths = {"true": True, "false": False}
    if value.lower() not in truths:
        raise UsageError(f"values {pair}: write true or false, not {value!r}.")
    return truths[value.lower()]


def _count(pair: str, value: str) -> Count:
    if value == "upper":
        return "upper"
    try:
        count = float(value) if "." in value else int(value)
    except ValueError:
        count = -1
    if count < 0 or (isinstance(count, float) and not 0 < count <= 1):
        raise UsageError(
            f"values {pair}: write upper, a fraction of all elements in (0, 1] like 0.25, "
            f"or a number of elements."
        )
    return count
