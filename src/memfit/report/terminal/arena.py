"""What came of an arena, on a terminal."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.records import Figure, Provenance, Term
from memfit.report.escape import inert
from memfit.report.printable import Printed
from memfit.units import format_bytes


@dataclass(frozen=True, slots=True)
class PlacedSteps:
    """Steps of one kind, and what became of their allocations."""

    name: str
    """``training step with float32[32, 3, 224, 224]``."""
    recorded: int
    """Steps."""
    placed: int
    """Steps."""
    allocations: int
    """Of a step, by its plan; 0 where there is none."""
    kept: int
    """Of those, what is the ordinary allocator's by plan: it outlives a step, or other streams use it."""
    unplanned: int
    """Allocations of all placed steps that had no place in their plan, or did not get it."""
    unshared: int
    """Bytes if each placed allocation of a step had memory of its own."""
    live: int
    """Bytes of them that live at once, at most."""
    planned: int
    """Bytes of the arena that the plan needs."""


@dataclass(frozen=True, slots=True, repr=False)
class PlacedRun(Printed):
    """What came of an arena, and prints itself."""

    steps: tuple[PlacedSteps, ...]
    terms: tuple[Term, ...]
    """What is reserved or used in all: simulated where it is PyTorch's allocator's, and measured."""

    @property
    def planned(self) -> int:
        """Bytes of the arena: as many as the largest plan needs."""
        return max((step.planned for step in self.steps), default=0)

    def show(self, console: Console) -> None:
        """Print it."""
        console.print(
            Text("ARENA", style="bold").append(f"   {format_bytes(self.planned)}", style="not bold")
        )
        for step in self.steps:
            console.print(Text(inert(step.name), style="bold"))
            console.print(Text(f"  {_what_came(step)}"))
            if step.allocations:
                console.print(_table(_of_plan(step)))
        if self.terms:
            console.print(Text("in all", style="bold"))
            console.print(_table(self.terms))


def _what_came(step: PlacedSteps) -> str:
    if not step.placed:
        return f"{step.recorded:,} recorded" + (
            ", and planned" if step.allocations else ", none twice the same"
        )
    kept = f", {step.kept:,} kept longer or used elsewhere" if step.kept else ""
    return (
        f"{step.recorded:,} recorded, {step.placed:,} placed: {step.allocations:,} allocations each{kept}; "
        f"{step.unplanned:,} unplanned in all"
    )


def _of_plan(step: PlacedSteps) -> Iterator[Term]:
    for name, size in (
        ("each allocation by itself", step.unshared),
        ("live at once", step.live),
        ("planned", step.planned),
    ):
        yield Term(name, Figure(size, Provenance.EXACT))


def _table(terms: tuple[Term, ...] | Iterator[Term]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for term in terms:
        figure = term.figure
        table.add_row(
            Text(f"  {term.name}"), format_bytes(figure.bytes), Text(figure.provenance, style="dim")
        )
    return table
