"""What of the page is there without any script: the verdict, the ladder, and what the reader must know."""

from html import escape

from memfit.records import DryRun, Figure, Provenance
from memfit.report.html.words import Words
from memfit.report.terminal import MACHINES, growth, in_words, subject, verdict
from memfit.units import GIB, MIB, format_bytes, format_gib

_WIDTH = 1000  # units of the bar: SVG's own, the page scales them
TOTALS = ("allocated", "reserved", "process")


def verdict_in_html(result: DryRun, words: Words) -> dict[str, str]:
    """Return the verdict's parts: its word, what follows it, the subject and the peak.

    Args:
        result: what to tell of.
        words: what may be shown.
    """
    first, *more = verdict(result).plain.splitlines()
    word, _, rest = first.partition("   ")
    lines = [rest, *more] if rest else more
    return {
        "kind": {"fits": "good", "unknown": "unsure"}.get(result.verdict, "bad"),
        "verdict": _text(words, word.capitalize()),
        "needs": "<br>".join(_text(words, line.strip().replace("   ", " · ")) for line in lines),
        "subject": _text(words, subject(result).plain),
        "script": _text(words, result.command[0] if result.command else result.device.name),
        "peak": _text(words, in_words(result.peak_place)),
        "growth": _text(words, growth(result).plain),
    }


def ladder(result: DryRun) -> str:
    """Return the rungs from allocated to the capacity, each with its bytes and where they come from."""
    figures = {term.name: term.figure for term in result.terms}
    device = result.device
    total = device.total
    rungs = [
        _rung(name, figures[name], _FOLLOWS[name])
        for name in TOTALS
        if name != "process" or total.bytes  # a snapshot tells of no device, and of no context
    ]
    if device.in_use:
        rungs.append(
            _rung(
                "in use by others", Figure(device.in_use, Provenance.ASSUMED), "other processes on the device"
            )
        )
    if total.bytes:
        rungs.append(_rung("capacity", total, _left(result)))
    return f'<dl class="rungs">{"".join(rungs)}</dl>{_bar(result, figures)}'


def _left(result: DryRun) -> str:
    left = result.device.total.bytes - result.peak_process.bytes - result.device.in_use
    if result.verdict == "out of memory" and result.out_of_memory is not None:
        return f"{format_bytes(result.out_of_memory.requested)} more was asked for"
    return f"leaves {format_gib(left)}" if left >= 0 else f"short {format_gib(-left)}"


_FOLLOWS = {
    "allocated": "tensors, at most",
    "reserved": "with PyTorch's cache, at most",
    "process": "with the CUDA context: nvidia-smi",
}


def _rung(name: str, figure: Figure, follows: str) -> str:
    source = f' title="{escape(figure.source)}"' if figure.source else ""
    return (
        f'<div><dt>{escape(name)}</dt><dd data-bytes="{figure.bytes}"><b>{_amount(figure.bytes)}</b> '
        f'<span class="sure"{source}>{figure.provenance}</span><small>{escape(follows)}</small></dd></div>'
    )


def _amount(amount: int) -> str:
    return format_gib(amount) if amount >= GIB else f"{amount / MIB:,.2f} MiB"


def _bar(result: DryRun, figures: dict[str, Figure]) -> str:
    """Draw the rungs on one scale: that of the capacity, or of what is needed if that is more."""
    device = result.device
    full = max(device.total.bytes, result.peak_process.bytes + device.in_use, 1)
    pieces = [
        ("allocated", "allocated", figures["allocated"].bytes),
        ("cached", "cached, not allocated", figures["reserved"].bytes - figures["allocated"].bytes),
        ("context", "CUDA context", result.peak_process.bytes - figures["reserved"].bytes),
        ("others", "in use by others", device.in_use),
    ]
    drawn, at = [], 0.0
    for kind, name, amount in pieces:
        width = _WIDTH * amount / full
        drawn.append(
            f'<rect class="{kind}" x="{at:.2f}" y="0" width="{width:.2f}" height="14">'
            f"<title>{escape(name)}: {format_bytes(amount)}</title></rect>"
        )
        at += width
    if device.total.bytes and device.total.bytes < full:
        edge = _WIDTH * device.total.bytes / full
        drawn.append(f'<rect class="edge" x="{edge - 1:.2f}" y="0" width="2" height="14"/>')
    said = ", ".join(f"{name} {format_bytes(amount)}" for _, name, amount in pieces)
    return (
        f'<svg class="scale" viewBox="0 0 {_WIDTH} 14" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(said)}, of {format_bytes(full)}">{"".join(drawn)}</svg>'
    )


def terms(result: DryRun) -> str:
    """Return the rows that sum to the process's peak."""
    rows = []
    for term in result.terms:
        kind = " class=total" if term.name in TOTALS else ""
        amount = term.figure.bytes
        rows.append(
            f'<tr{kind}><th scope="row">{escape(term.name)}</th><td data-bytes="{amount}">{amount:,}</td>'
            f"<td>{format_bytes(amount)}</td><td>{term.figure.provenance}</td></tr>"
        )
    return "".join(rows)


def notes(result: DryRun, words: Words) -> str:
    """Return each note once, with every place it was made at."""
    places: dict[tuple[str, str], list[str]] = {}
    for note in result.notes:
        where = places.setdefault((note.provenance, note.text), [])
        if note.where:
            where.append(note.where)
    items = [
        f'<li class="long"><span class="sure">{escape(provenance)}</span> {_text(words, text)} '
        + "".join(f"<code>{_text(words, one)}</code> " for one in where)
        + "</li>"
        for (provenance, text), where in places.items()
    ]
    machine = MACHINES.get(result.device.machine)
    if machine is not None:
        items.append(f"<li>{escape(machine)}</li>")
    return "".join(items)


def versions(result: DryRun, words: Words) -> str:
    """Return what the figures were made with."""
    rows = {**result.versions, "device": result.device.name, "command": " ".join(result.command)}
    return "".join(
        f'<tr><th scope="row">{_text(words, name)}</th>'
        f'<td><span class="long">{_text(words, value)}</span></td></tr>'
        for name, value in rows.items()
        if value
    )


def _text(words: Words, text: str) -> str:
    return escape(words.shown(text))
