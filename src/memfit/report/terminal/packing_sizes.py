"""The sizes of a packing, as ``memfit pack --json`` writes them, and how they are printed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.packing.best_packing import Packing
from memfit.packing.graph_packing import GraphPacking
from memfit.packing.run_packing import PoolPacking, RunPacking
from memfit.records import DEFAULT_POOL, Provenance, worst_provenance
from memfit.report.terminal.layout import plain_table
from memfit.units import format_bytes, format_gib


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of memory: bytes for a run, the table's own units for a table."""

    amount: int
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class ReservedAmount:
    """The peak that PyTorch's allocator reserves over the whole run under a setting."""

    setting: str
    """A value of PYTORCH_ALLOC_CONF; an empty string is the default."""
    amount: int
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class ArenaSizes:
    """The arena of one stream and memory pool. A table has a single arena."""

    stream: int
    pool: tuple[int, int]
    """[0, 0] is the default pool."""
    buffers: int
    planned: int
    bound: int
    how: str
    """The packer that found the packing."""


@dataclass(frozen=True, slots=True)
class PackingSizes:
    """The sizes of a packing."""

    json_description = "What ``memfit pack --json`` writes."

    capacity: int | None
    """The capacity requested; None if none was."""
    fits: bool | None
    """Whether the packing is within the capacity; None without one."""
    step: int | None
    """The training step that is packed, from 1, on behalf of all steps like it; 0 for the whole run, None
    for a table."""
    planned: Amount
    """The size of all arenas together."""
    bound: Amount
    """A lower bound: no packing is smaller. If it exceeds the capacity, no packing fits."""
    live: Amount
    """The most that is live at once."""
    unshared: Amount
    """The sum of all buffers: the size if no memory were reused."""
    reserved: tuple[ReservedAmount, ...]
    """For comparison, what PyTorch's allocator reserves without a plan; empty for a table."""
    arenas: tuple[ArenaSizes, ...]

    @classmethod
    def of(cls, found: Packing | RunPacking, capacity: int | None) -> Self:
        """Return the sizes of a packing, searched for within a capacity if there is one."""
        run = found if isinstance(found, RunPacking) else None
        arenas = (PoolPacking(0, DEFAULT_POOL, found),) if isinstance(found, Packing) else found.arenas
        provenance = run.sure if run else Provenance.EXACT
        planned = worst_provenance(Provenance.SIMULATED, provenance)
        return cls(
            capacity=capacity,
            fits=None if capacity is None else found.height <= capacity,
            step=run.step if run else None,
            planned=Amount(found.height, planned),
            bound=Amount(found.bound, provenance),
            live=Amount(found.live, provenance),
            unshared=Amount(found.unshared, provenance),
            reserved=tuple(
                ReservedAmount(row.setting.name, row.replay.peak_reserved, planned)
                for row in (run.reserved if run else ())
            ),
            arenas=tuple(
                ArenaSizes(
                    arena.stream,
                    arena.pool,
                    len(arena.packing.buffers),
                    arena.packing.height,
                    arena.packing.bound,
                    arena.packing.how,
                )
                for arena in arenas
            ),
        )


def print_packing(found: PackingSizes, console: Console) -> None:
    """Print how buffers pack; for a run, also what PyTorch's allocator reserves without a plan."""
    # The sizes of a table have its own unit.
    amount = "{:,}".format if found.step is None else format_bytes
    console.print(_verdict(found.planned.amount, found.bound.amount, found.capacity, amount))
    if found.step is None:
        (arena,) = found.arenas
        console.print(f"{arena.buffers:,} buffers, packed {arena.how}")
        return
    whose = f"step {found.step}" if found.step else "the run"
    rows: list[tuple[str, Amount | ReservedAmount]] = [
        (f"each buffer of {whose} by itself", found.unshared),
        ("live at once", found.live),
        ("planned", found.planned),
        *((f"reserved, {each.setting or 'default settings'}", each) for each in found.reserved),
    ]
    amounts = [(name, each.amount, each.provenance) for name, each in rows]
    console.print(_sizes(amounts, found.live.amount, format_gib))
    if len(found.arenas) > 1:
        table = plain_table("rrrrr", "stream", "pool", "buffers", "planned", "bound")
        for arena in found.arenas:
            pool = "" if arena.pool == DEFAULT_POOL else str(arena.pool)
            sizes = map(format_bytes, (arena.planned, arena.bound))
            table.add_row(str(arena.stream), pool, f"{arena.buffers:,}", *sizes)
        console.print(table)


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
    amounts = [(name, size, Provenance.SIMULATED) for name, size in rows]
    console.print(_sizes(amounts, found.live, format_bytes))
    if len(found.arenas) > 1:
        table = plain_table("rrrr", "device", "buffers", "planned", "bound")
        for arena in found.arenas:
            sizes = map(format_bytes, (arena.packing.height, arena.packing.bound))
            table.add_row(arena.device, f"{len(arena.packing.buffers):,}", *sizes)
        console.print(table)
    console.print(
        f"Not included: {format_bytes(found.given)} of inputs, parameters and constants, and memory that "
        "operations allocate and free internally, which a graph does not show."
    )


def _verdict(height: int, bound: int, capacity: int | None, amount: Callable[[int], str]) -> Text:
    ratio = "proven minimal" if height == bound else f"{height / bound:.4f} times the lower bound"
    if capacity is None or height <= capacity:
        of = "" if capacity is None else f" of {amount(capacity)}"
        verdict = Text("PACKED" if capacity is None else "FITS", style="bold green")
        return verdict.append(f"   {amount(height)}{of}, {ratio}", style="not bold default")
    none = "no packing fits" if bound > capacity else "no packing that fits was found"
    rest = f"   {amount(capacity)}: {none}; the smallest found is {amount(height)}, {ratio}"
    return Text("DOES NOT FIT", style="bold red").append(rest, style="not bold default")


def _sizes(rows: list[tuple[str, int, Provenance]], live: int, amount: Callable[[int], str]) -> Table:
    table = plain_table("lrrl")
    for name, size, provenance in rows:
        ratio = f"{size / max(live, 1):.3f}"
        table.add_row(Text(name), amount(size), ratio, Text(provenance, style="dim"))
    return table
