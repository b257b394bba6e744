"""What prints itself: printed, or as the last line of a notebook's cell, it is what the command shows."""

import io
from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any, Self

from rich.console import Console

_WIDTH = 100  # columns of what is no terminal


class Printed(ABC):
    """Comes before the dataclass of what was found, whose fields it has."""

    __slots__ = ()

    @classmethod
    def of(cls, found: Any, **more: Any) -> Self:
        """Have what was found print itself; ``more`` are further fields, or what stands in their place."""
        return cls(**{field.name: getattr(found, field.name) for field in fields(found)} | more)

    @abstractmethod
    def show(self, console: Console) -> None:
        """Print it."""

    def __str__(self) -> str:
        text = io.StringIO()
        # In a notebook rich would show each line where the cell is, instead of writing it.
        console = Console(
            file=text, width=_WIDTH, highlight=False, markup=False, emoji=False, force_jupyter=False
        )
        self.show(console)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    __repr__ = __str__
