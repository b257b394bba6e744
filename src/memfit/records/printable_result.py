"""What all results share: that they print as the command shows them, and the version of their JSON."""

from importlib import import_module
from typing import ClassVar

SCHEMA_VERSION = 1
"""``schema`` in the public JSON. Fields may be added within a version; none is removed or changes meaning."""


class PrintableResult:
    """Mix-in for the dataclasses of results, declared with ``repr=False``: text is what the command prints.

    With ``print``, and as the last line of a notebook cell.
    """

    __slots__ = ()
    json_description: ClassVar[str] = ""
    """What its JSON Schema says, and which command writes it; empty if none does."""

    def __str__(self) -> str:
        # Imported by name and on first use: records may not import report, a higher layer.
        return str(import_module("memfit.report.result_printers").printed_text_of_result(self))

    __repr__ = __str__
