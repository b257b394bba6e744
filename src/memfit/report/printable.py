"""Results that print as the command shows them, with ``print`` or as the last line of a notebook cell."""

import io
from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any, Self

from rich.console import Console

_WIDTH = 100  # columns; the output may not be a terminal


class Printable(ABC):
    """Mix-in for subclasses of result dataclasses, as their first base: text is what ``show`` prints."""

    __slots__ = ()

    @classmethod
    def of(cls, found: Any, **more: Any) -> Self:
        """Return a printable copy of a result; ``more`` adds fields, or replaces those of the result."""
        return cls(**{field.name: getattr(found, field.name) for field in fields(found)} | more)

    @abstractmethod
    def show(self, console: Console) -> None:
        """Print the result."""

    def __str__(self) -> str:
        text = io.StringIO()
        # force_jupyter=False: in a notebook rich would display each line instead of writing it to the file.
        console = Console(
            file=text, width=_WIDTH, highlight=False, markup=False, emoji=False, force_jupyter=False
        )
        self.show(console)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    __repr__ = __str__
