"""A packing, on the terminal."""

from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.packing.graph_packing import GraphPacking
from memfit.packing.run_packing import RunPacking
from memfit.records import DEFAULT_POOL, Provenance
from memfit.report.packing_sizes import Amount, PackingSizes, ReservedAmount
from memfit.units import format_bytes, format_gib


def print_packing(found: PackingSizes, console: Console) -> None:
    """Print how buffers pack; for a run, also what PyTorch's allocator reserves without a plan."""
    # The sizes of a table have its own unit.
    amount = "{:,}".format if found.step is None else format_bytes
    console.print(_verdict(found.planned.amount, found.bound.amount, found.capacity, amount))
    if found.step is None:
        (table,) = found.arenas
        console.print(Text(f"{table.buffers:,} buffers, packed {table.how}"))
        return
    whose = f"step {found.step}" if found.step else "the run"
    rows: list[tuple[str, Amount | ReservedAmount]] = [
        (f"each buffer of {whose} by itself", found.unshared),
        ("live at once", found.live),
        ("planned", found.planned),
        *((f"reserved, {each.setting or 'default settings'}", each) for each in found.reserved),
    ]
    sizes = [(name, each.amount, each.provenance) for name, each in rows]
    console.print(_sizes(sizes, found.live.amount, format_gib))
    if len(found.arenas) > 1:
        console.print(_arenas(found))


def print_run_packing(found: RunPacking, console: Console) -> None:
    """Print how the buffers of a run pack."""
    print_packing(PackingSizes.of(found, None), console)


def print_graph_packing(found: GraphPacking, console: Console) -> None:
    """Print how the memory of a graph packs."""
    console.print(_verdict(found.height, found.bound, None, format_bytes))
    rows = [
        ("each buffer of the graph by itself", found.unshared),
        ("live at once", found.live),
        ("planned", found.height),
    ]
    table = _sizes([(name, size, Provenance.SIMULATED) for name, size in rows], found.live, format_bytes)
    console.print(table)
    if len(found.arenas) > 1:
        console.print(_devices(found))
    text = (
        f"Not included: {format_bytes(found.given)} of inputs, parameters and constants, and memory that "
        "operations allocate and free internally, which a graph does not show."
    )
    console.print(Text(text))


def _verdict(height: int, bound: int, capacity: int | None, amount: Callable[[int], str]) -> Text:
    ratio = "proven minimal" if height == bound else f"{height / bound:.4f} times the lower bound"
    if capacity is None or height <= capacity:
        verdict = Text("PACKED" if capacity is None else "FITS", style="bold green")
        verdict.append(f"   {amount(height)}", style="not bold default")
        if capacity is not None:
            verdict.append(f" of {amount(capacity)}", style="not bold default")
        verdict.append(f", {ratio}", style="not bold default")
        return verdict
    none = "no packing fits" if bound > capacity else "no packing that fits was found"
    return Text("DOES NOT FIT", style="bold red").append(
        f"   {amount(capacity)}: {none}; the smallest found is {amount(height)}, {ratio}",
        style="not bold default",
    )


def _sizes(rows: list[tuple[str, int, Provenance]], live: int, amount: Callable[[int], str]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for name, size, provenance in rows:
        ratio = f"{size / max(live, 1):.3f}"
        table.add_row(Text(name), amount(size), ratio, Text(provenance, style="dim"))
    return table


def _arenas(found: PackingSizes) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("stream", "pool", "buffers", "planned", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for arena in found.arenas:
        pool = "" if arena.pool == DEFAULT_POOL else str(arena.pool)
        sizes = map(format_bytes, (arena.planned, arena.bound))
        table.add_row(str(arena.stream), pool, f"{arena.buffers:,}", *sizes)
    return table


def _devices(found: GraphPacking) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("device", "buffers", "planned", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for arena in found.arenas:
        sizes = map(format_bytes, (arena.packing.height, arena.packing.bound))
        table.add_row(arena.device, f"{len(arena.packing.buffers):,}", *sizes)
    return table
