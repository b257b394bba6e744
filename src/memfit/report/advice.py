"""What lowers what a run needs, in words."""

from collections.abc import Iterator

from rich.text import Text

from memfit.records import Advice
from memfit.report.inert import inert
from memfit.units import format_bytes

NONE = "Nothing was found that saves 1 % and leaves the training loop alone."
FITS = {True: "fits", False: "does not fit yet", None: ""}
EACH = "each was tried, with those above it"


def advice_in_words(found: tuple[Advice, ...]) -> Iterator[Text]:
    """Yield lines that give advice in its order; what each saves is beyond those above it.

    >>> [line.plain for line in advice_in_words(())][1:]
    ['Nothing was found that saves 1 % and leaves the training loop alone.']
    """
    yield Text()
    if not found:
        yield Text(NONE)
        return
    yield Text(f"Do next: {EACH}")
    width = max(len(one.what) for one in found)
    for number, one in enumerate(found, 1):
        line = Text(f"  {number} {one.what:<{width}}  saves {format_bytes(one.saves.bytes):>10}")
        line.append(f" {one.saves.provenance:<9}", style="dim")
        line.append(f"  needs {format_bytes(one.needs.bytes):>10}")
        line.append(f"  {FITS[one.fits]}", style="bold green" if one.fits else "")
        yield line
        yield Text(f"    {inert(one.how)}")
        yield Text(f"    costs {one.costs}", style="dim")
