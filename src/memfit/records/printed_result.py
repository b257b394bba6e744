"""Results that print as the command shows them."""

from importlib import import_module


class PrintedResult:
    """Mix-in for the dataclasses of results, declared with ``repr=False``: text is what the command prints.

    With ``print``, and as the last line of a notebook cell.
    """

    __slots__ = ()

    def __str__(self) -> str:
        # By its name, and only now: records are below report, and whoever prints nothing need not load it.
        return str(import_module("memfit.report.printers").text_of(self))

    __repr__ = __str__
