"""The table of what makes up a run's peak, with totals, and what nvidia-smi would show.

nvidia-smi lists a process. The first version of ``nvmlDeviceGetMemoryInfo`` counts all that is used on the
card: by this process, by others, and by the driver. The second version leaves the driver's part out.
"""

from rich.table import Table
from rich.text import Text

from memfit.records import DryRun, Machine, worst
from memfit.units import MIB, unit_for

_BAR = 20  # characters of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉"
_WITH_BARS, _WITH_SHARES = 80, 56  # terminal columns from which on they are shown
TOTALS = {"allocated", "reserved", "process"}


def term_table(result: DryRun, width: int) -> Table:
    """Return the terms of the peak; below them, what two tools would show of it.

    Args:
        result: the run.
        width: columns of the terminal.
    """
    total = max(result.peak_process.bytes, 1)
    unit = unit_for(result.peak_reserved)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column()
    for justify in ("right", "right", "left"):
        table.add_column(justify="right" if justify == "right" else "left", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    for term in result.terms:
        total_row = term.name in TOTALS
        if not total_row and unit.rounds_to_zero(term.figure.bytes):
            continue
        name = Text(("── " if total_row else "  ") + term.name, style="bold" if total_row else "")
        share = term.figure.bytes / total
        table.add_row(
            name,
            unit.format(term.figure.bytes),
            "" if total_row or width < _WITH_SHARES else f"{100 * share:.0f} %",
            "" if total_row or width < _WITH_BARS else _bar(share),
            term.figure.provenance,
        )
    if result.device.machine is Machine.CPU:
        return table
    shown = f"{-(-result.peak_process.bytes // MIB):,} MiB"
    table.add_row(Text("   in nvidia-smi"), shown, "", "", result.peak_process.provenance)
    if (driver := result.device.driver) is not None:
        whole_card = result.peak_process.bytes + driver.bytes + result.device.in_use
        shown = f"{-(-whole_card // MIB):,} MiB"
        sure = worst(result.peak_process.provenance, driver.provenance)
        table.add_row(Text("   in NVML's v1"), shown, "", "", sure)
    return table


def _bar(share: float) -> str:
    whole, eighths = divmod(round(share * _BAR * 8), 8)
    return "█" * whole + _EIGHTHS[eighths].strip()
