"""A packing, on the terminal."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.packing.best_packing import Packing
from memfit.packing.graph_packing import GraphPacking
from memfit.packing.run_packing import IndependentPackings, RunPacking
from memfit.records import DEFAULT_POOL, Provenance, worst
from memfit.report.printable import Printable
from memfit.units import format_bytes, format_gib


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PrintableRunPacking(Printable, RunPacking):
    """The packing of a run that prints itself."""

    def show(self, console: Console) -> None:
        """Print the packing."""
        print_packing(self, None, console)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PrintableGraphPacking(Printable, GraphPacking):
    """The packing of a graph that prints itself."""

    def show(self, console: Console) -> None:
        """Print the packing."""
        console.print(_verdict(self, None))
        rows = [
            ("each buffer of the graph by itself", self.unshared),
            ("live at once", self.live),
            ("planned", self.height),
        ]
        table = _sizes([(name, size, Provenance.SIMULATED) for name, size in rows], self.live, format_bytes)
        console.print(table)
        if len(self.arenas) > 1:
            console.print(_devices(self))
        text = (
            f"Not included: {format_bytes(self.given)} of inputs, parameters and constants, and memory that "
            "operations allocate and free internally, which a graph does not show."
        )
        console.print(Text(text))


def print_packing(found: Packing | RunPacking, capacity: int | None, console: Console) -> None:
    """Print how buffers pack; for a run, also what PyTorch's allocator reserves without a plan."""
    console.print(_verdict(found, capacity))
    if isinstance(found, RunPacking):
        console.print(_run_sizes(found))
        if len(found.arenas) > 1:
            console.print(_arenas(found))
    else:
        console.print(Text(f"{len(found.buffers):,} buffers, packed {found.how}"))


def _verdict(found: Packing | IndependentPackings, capacity: int | None) -> Text:
    if capacity is None or found.height <= capacity:
        verdict = Text("PACKED" if capacity is None else "FITS", style="bold green")
        verdict.append(f"   {_amount(found, found.height)}", style="not bold default")
        if capacity is not None:
            verdict.append(f" of {_amount(found, capacity)}", style="not bold default")
        verdict.append(f", {_ratio(found)}", style="not bold default")
        return verdict
    none = "no packing fits" if found.bound > capacity else "no packing that fits was found"
    return Text("DOES NOT FIT", style="bold red").append(
        f"   {_amount(found, capacity)}: {none}; the smallest found is {_amount(found, found.height)}, "
        f"{_ratio(found)}",
        style="not bold default",
    )


def _amount(found: Packing | IndependentPackings, size: int) -> str:
    # The sizes of a table have its own unit.
    return format_bytes(size) if isinstance(found, IndependentPackings) else f"{size:,}"


def _ratio(found: Packing | IndependentPackings) -> str:
    if found.height == found.bound:
        return "proven minimal"
    return f"{found.height / found.bound:.4f} times the lower bound"


def _run_sizes(found: RunPacking) -> Table:
    whose = f"step {found.step}" if found.step else "the run"
    planned = worst(Provenance.SIMULATED, found.sure)
    rows = [
        (f"each buffer of {whose} by itself", found.unshared, found.sure),
        ("live at once", found.live, found.sure),
        ("planned", found.height, planned),
    ]
    for outcome in found.reserved:
        name = f"reserved, {outcome.setting.name or 'default settings'}"
        rows.append((name, outcome.replay.peak_reserved, planned))
    return _sizes(rows, found.live, format_gib)


def _sizes(rows: list[tuple[str, int, Provenance]], live: int, amount: Callable[[int], str]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for name, size, provenance in rows:
        ratio = f"{size / max(live, 1):.3f}"
        table.add_row(Text(name), amount(size), ratio, Text(provenance, style="dim"))
    return table


def _arenas(found: RunPacking) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("stream", "pool", "buffers", "planned", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for arena in found.arenas:
        pool = "" if arena.pool == DEFAULT_POOL else str(arena.pool)
        sizes = map(format_bytes, (arena.packing.height, arena.packing.bound))
        table.add_row(str(arena.stream), pool, f"{len(arena.packing.buffers):,}", *sizes)
    return table


def _devices(found: GraphPacking) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("device", "buffers", "planned", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for arena in found.arenas:
        sizes = map(format_bytes, (arena.packing.height, arena.packing.bound))
        table.add_row(arena.device, f"{len(arena.packing.buffers):,}", *sizes)
    return table
