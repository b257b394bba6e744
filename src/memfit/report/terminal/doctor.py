"""The findings of ``memfit doctor``, on the terminal."""

from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.text import Text

from memfit.patching.patch_list import ReplacedName

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


def print_replaced_names(names: Sequence[ReplacedName], console: Console) -> int:
    """Print one line per name and purpose; return the command's exit code: an error if a name is missing."""
    width = max(len(each.state) for each in names)
    missing = [each for each in names if each.state == "absent" and not each.optional]
    for each in names:
        style = "bold red" if each in missing else "green" if each.state == "present" else "dim"
        more = "; ".join(filter(None, (each.source, each.optional)))
        line = f" {each.name}: to {each.why}" + (f" ({more})" if more else "")
        console.print(Text.assemble((f"{each.state:{width}}", style), line))
    console.print(f"{len({each.name for each in names}):,} names, {len(missing)} missing")
    return _CANNOT_RUN if missing else 0
