"""What lowers what a run needs, in words."""

from collections.abc import Iterator

from rich.text import Text

from memfit.records import DryRun
from memfit.report.escape import inert
from memfit.units import format_bytes

NONE = "Nothing was found that saves 1 % and leaves the training loop alone."
FITS = {True: "fits", False: "does not fit yet", None: ""}


def heading(result: DryRun) -> str:
    """Say how advice came about, and what its savings are counted from where that is not shown already."""
    counted = ""
    if result.in_all is not None and result.in_all.bytes != result.peak_process.bytes:
        counted = f"; it needs {format_bytes(result.in_all.bytes)} where memory does not end"
    return f"each was tried, with those above it{counted}"


def advice_in_words(result: DryRun, untried: str) -> Iterator[Text]:
    """Yield lines that give a result's advice in its order; what each saves is beyond those above it.

    Args:
        result: where advice was asked for.
        untried: what keeps more from being advised, if anything does.
    """
    found = result.advice or ()
    yield Text()
    if found:
        yield Text(f"Do next: {heading(result)}")
    width = max((len(one.what) for one in found), default=0)
    for number, one in enumerate(found, 1):
        line = Text(f"  {number} {one.what:<{width}}  saves {format_bytes(one.saves.bytes):>10}")
        line.append(f" {one.saves.provenance:<9}", style="dim")
        line.append(f"  needs {format_bytes(one.needs.bytes):>10}")
        line.append(f"  {FITS[one.fits]}", style="bold green" if one.fits else "")
        yield line
        yield Text(f"    {inert(one.how)}")
        yield Text(f"    costs {one.costs}", style="dim")
    if untried:
        yield Text(untried, style="yellow")
    elif not found:
        yield Text(NONE)
