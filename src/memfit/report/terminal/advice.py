"""Advice that lowers the peak of a run, on the terminal."""

from collections.abc import Iterator

from rich.text import Text

from memfit.records import Advice, DryRun
from memfit.report.escape_control_characters import escaped
from memfit.report.places_in_words import short_path
from memfit.units import format_bytes

NO_ADVICE = "No change was found that saves at least 1 %."


def advice_heading(result: DryRun) -> str:
    """Describe what the advice achieves, and the total it starts from if the summary does not show that."""
    total = ""
    if result.needs is not None and result.caught:
        needs = f"{needs_or_needs_at_most(result)} {format_bytes(result.needs.bytes)}"
        total = f"The script handles its out-of-memory errors. To run without one, it {needs}. "
    return f"{total}{_achieved(result)}"


def _achieved(result: DryRun) -> str:
    found = result.advice or ()
    several = len(found) > 1
    if result.verdict in ("fits", "unknown") and not result.caught:
        peak = "the peak" if not result.end.stopped else f"the peak of the {steps_run_in_words(result)}"
        return f"Each of these lowers {peak} on its own." if several else f"This lowers {peak}."
    if any(advice_outcome(result, one) == "tight" for one in found):
        return "No change is certain to be enough, because the CUDA context is assumed. These save the most:"
    if not any(one.fits for one in found):
        return "No change that memfit tried is enough. These save the most:"
    if len(found[0].changes) > 1:
        together = "Each of these combinations is:" if several else "Together, these are:"
        return f"No single change is enough. {together}"
    return "Each of these is enough on its own:" if several else "This is enough:"


def steps_run_in_words(result: DryRun) -> str:
    """Return how many training steps were run."""
    return f"{result.steps} training step{'s' * (result.steps != 1)}"


def advice_outcome(result: DryRun, one: Advice) -> str:
    """Return how the run then fits its device, as a verdict does; empty without a device."""
    if one.fits is None:
        return ""
    if one.fits:
        return "fits"
    left = result.device.total.bytes - result.device.in_use - one.needs.bytes
    return "tight" if left >= 0 else "does not fit"


def needs_or_needs_at_most(result: DryRun) -> str:
    """Return the verb before what a script needs, which says so if that is an upper bound."""
    return "needs at most" if result.bound else "needs"


def advice_lines(result: DryRun, untried: str) -> Iterator[Text]:
    """Yield a result's advice as lines, in order; each piece is an alternative to the others.

    Args:
        result: a run with advice.
        untried: why there is no more advice; empty if everything was tried.
    """
    found = result.advice or ()
    yield Text()
    if found:
        yield Text(f"What to do next. {advice_heading(result)}")
    width = max((len(change) for one in found for change in one.changes), default=0)
    for number, one in enumerate(found, 1):
        line = Text(
            f"  {number} {escaped(one.changes[0]):<{width}}  saves {format_bytes(one.saves.bytes):>10}"
        )
        line.append(f" {one.saves.provenance:<9}", style="dim")
        line.append(f"  {needs_or_needs_at_most(result)} {format_bytes(one.needs.bytes):>10}")
        line.append(f"  {advice_outcome(result, one)}", style="bold green" if one.fits else "")
        yield line
        for change in one.changes[1:]:
            yield Text(f"  + {escaped(change)}")
        for how in one.how:
            yield Text(f"    {escaped(how)}")
        if one.where:
            yield Text(f"    in {escaped(short_path(one.where))}")
        yield Text(f"    costs {one.costs}", style="dim")
    for remark in result.advice_remarks:
        yield Text(remark)
    if untried:
        yield Text(untried, style="yellow")
    elif not found:
        yield Text(NO_ADVICE)
