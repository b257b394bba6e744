"""The report of a ``memfit.arena``, on the terminal."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.records import Figure, Provenance, Term
from memfit.records.printable_result import PrintableResult
from memfit.report.escape_control_characters import escaped
from memfit.report.terminal.layout import plain_table
from memfit.units import format_bytes


@dataclass(frozen=True, slots=True)
class StepKindReport:
    """Steps of one kind, and where their allocations were placed."""

    name: str
    """``training step with float32[32, 3, 224, 224]``."""
    recorded: int
    """Number of steps recorded."""
    placed: int
    """Number of steps placed."""
    allocations: int
    """Number of allocations in the plan of a step; 0 without a plan."""
    kept: int
    """How many the plan leaves to the default allocator: they outlive a step or serve other streams."""
    unplanned: int
    """Allocations of all placed steps that had no slot in the plan, or whose slot was still occupied."""
    unshared: int
    """Sum of the placed allocations of a step, in bytes: what they take if no memory is reused."""
    live: int
    """The most bytes of them that are live at once."""
    planned: int
    """Arena size that the plan needs, in bytes."""


@dataclass(frozen=True, slots=True, repr=False)
class ArenaReport(PrintableResult):
    """What ``Arena.report`` returns; it prints itself."""

    steps: tuple[StepKindReport, ...]
    terms: tuple[Term, ...]
    """Memory reserved or used in total: measured, and simulated for PyTorch's own allocator."""

    @property
    def planned(self) -> int:
        """Size of the arena in bytes: what the largest plan needs."""
        return max((step.planned for step in self.steps), default=0)


def print_arena_report(report: ArenaReport, console: Console) -> None:
    """Print where the steps of an arena placed their allocations, and what that takes."""
    console.print(Text("ARENA", style="bold").append(f"   {format_bytes(report.planned)}", style="not bold"))
    for step in report.steps:
        console.print(Text(escaped(step.name), style="bold"))
        console.print(f"  {_counts(step)}")
        if step.allocations:
            sizes = {
                "each allocation by itself": step.unshared,
                "live at once": step.live,
                "planned": step.planned,
            }
            console.print(_table(Term(name, Figure(size, Provenance.EXACT)) for name, size in sizes.items()))
    if report.terms:
        console.print(Text("in total", style="bold"))
        console.print(_table(report.terms))


def _counts(step: StepKindReport) -> str:
    if not step.placed:
        return f"{step.recorded:,} steps recorded" + (
            ", and planned" if step.allocations else "; no two were the same"
        )
    kept = f", {step.kept:,} of them kept longer than a step or used by other streams" if step.kept else ""
    return (
        f"{step.recorded:,} steps recorded, {step.placed:,} run according to the plan "
        f"({step.allocations:,} allocations each{kept}); {step.unplanned:,} unplanned allocations in total"
    )


def _table(terms: Iterable[Term]) -> Table:
    table = plain_table("lrl")
    for term in terms:
        figure = term.figure
        table.add_row(
            Text(f"  {term.name}"), format_bytes(figure.bytes), Text(figure.provenance, style="dim")
        )
    return table
