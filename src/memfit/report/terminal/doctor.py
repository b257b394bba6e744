"""The findings of ``memfit doctor``, on the terminal."""

from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.text import Text

_CANNOT_RUN = 3


class Finding(Protocol):
    """The result of one check."""

    @property
    def name(self) -> str:
        """What was checked."""

    @property
    def serves(self) -> bool:
        """Whether the check passed."""

    @property
    def text(self) -> str:
        """What was found, or how to fix it."""

    @property
    def details(self) -> tuple[str, ...]:
        """Lines that ``--gaps`` prints."""


def print_diagnosis(findings: Sequence[Finding], console: Console, *, details: bool) -> int:
    """Print one line per finding; return the command's exit code."""
    for finding in findings:
        mark = Text("ok   ", style="green") if finding.serves else Text("FAILS", style="bold red")
        console.print(Text.assemble(mark, f" {finding.name:9} {finding.text}"))
        if details:
            for line in finding.details:
                console.print(Text(f"                  {line}", style="dim"))
    return 0 if all(finding.serves for finding in findings) else _CANNOT_RUN
