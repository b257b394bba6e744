"""What a run needs and takes, in words: the smallest GPU on which it runs, and what it holds on this one."""

from collections.abc import Callable

from memfit.records import DryRun
from memfit.units import MIB, format_gib


def needs_and_takes(result: DryRun) -> str:
    """Return what the run needs, what it takes on this GPU if that is more, and what it leaves."""
    room = result.device.total.bytes - result.device.in_use
    least, most = taken(result)
    if result.caught:  # its attempts fill the GPU, whatever its size
        cached = result.peak_reserved - result.peak_allocated
        return f"takes {_of_gpu(result, least, most)}   {format_gib(cached)} of it only cached"
    left = f"at least {format_gib(room - most)}" if result.bound else span(room - most, room - least)
    as_much = needed(result) == f"needs {_of_gpu(result, least, most)}"
    takes = "" if as_much else f", takes {_amount(result, least, most)}"
    return f"{needed(result)}{takes}   leaves {left}"


def needed(result: DryRun) -> str:
    """Return what the run needs, of what this GPU has."""
    if result.needs is None:
        return f"needs {_of_gpu(result, *taken(result))}"
    ends = [each.bytes for each in (result.needs, result.needs_without_workspaces) if each is not None]
    return f"needs {_of_gpu(result, min(ends), max(ends))}"


def _of_gpu(result: DryRun, least: int, most: int) -> str:
    return f"{_amount(result, least, most)} of {format_gib(result.device.total.bytes)}"


def _amount(result: DryRun, least: int, most: int) -> str:
    """Return between which figures the process and others are."""
    least, most = (end + result.device.in_use for end in (least, most))
    return f"at most {format_gib(most)}" if result.bound else span(least, most)


def taken(result: DryRun) -> tuple[int, int]:
    """Return the process's bytes on this GPU, least and most: the same if they are no range."""
    process = result.peak_process.bytes
    return (
        (process, process)
        if result.range is None
        else (result.range.process.least, result.range.process.most)
    )


def _in_mib(amount: int) -> str:
    return f"{amount / MIB:,.0f} MiB"


def span(least: int, most: int, shown: Callable[[int], str] = format_gib) -> str:
    """Return "1.50 to 1.75 GiB"; one figure where both read alike."""
    low, high = shown(least), shown(most)
    return high if low == high else f"{low.split()[0]} to {high}"


def shortage(result: DryRun) -> str:
    """Return what the run needs in all, if that is known, beside what the GPU has."""
    has, others, bare = result.device.total.bytes, result.device.in_use, result.needs_without_workspaces
    if result.needs is None:
        return f"on a GPU of {format_gib(has)}"
    most = result.needs.bytes + others
    shown = _in_mib if format_gib(most) == format_gib(has) else format_gib
    if result.bound:
        amount = f"at most {shown(most)}"
    elif bare is None:
        amount = shown(most)
    elif shown(bare.bytes + others) == shown(has):  # the GPU on which it failed is the lower end
        amount = f"up to {shown(most)}"
    else:
        amount = span(bare.bytes + others, most, shown)
    return f"needs {amount}; this GPU has {shown(has)}"
