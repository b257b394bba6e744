"""Advice that lowers the peak of a run, on the terminal."""

from collections.abc import Iterator

from rich.text import Text

from memfit.records import DryRun
from memfit.report.escape import escaped
from memfit.units import format_bytes

NONE = "No change was found that saves at least 1 % without editing the training loop."
FITS = {True: "fits", False: "does not fit yet", None: ""}


def heading(result: DryRun) -> str:
    """Describe how advice was tested, and the total it starts from if the summary does not show that."""
    total = ""
    shown = result.out_of_memory is not None or (
        result.in_all is not None and result.in_all.bytes == result.peak_process.bytes
    )
    if result.in_all is not None and not shown:
        total = f" Unchanged, the run needs {format_bytes(result.in_all.bytes)}."
    return f"Each suggestion was tried together with the ones above it.{total}"


def advice_lines(result: DryRun, untried: str) -> Iterator[Text]:
    """Yield a result's advice as lines, in order; each saving comes on top of those above it.

    Args:
        result: a run with advice.
        untried: why there is no more advice; empty if everything was tried.
    """
    found = result.advice or ()
    yield Text()
    if found:
        yield Text(f"What to do next. {heading(result)}")
    width = max((len(one.what) for one in found), default=0)
    for number, one in enumerate(found, 1):
        line = Text(f"  {number} {one.what:<{width}}  saves {format_bytes(one.saves.bytes):>10}")
        line.append(f" {one.saves.provenance:<9}", style="dim")
        line.append(f"  needs {format_bytes(one.needs.bytes):>10}")
        line.append(f"  {FITS[one.fits]}", style="bold green" if one.fits else "")
        yield line
        yield Text(f"    {escaped(one.how)}")
        yield Text(f"    costs {one.costs}", style="dim")
    if untried:
        yield Text(untried, style="yellow")
    elif not found:
        yield Text(NONE)
