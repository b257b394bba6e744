"""The parts of the page that need no script: the verdict, the table of figures, advice and notes."""

from dataclasses import replace
from html import escape

from memfit.analysis.breakdown import CATEGORY_NAMES
from memfit.records import Category, DryRun, Figure, Provenance
from memfit.records.command_as_typed import command_as_typed
from memfit.report.html.page_payload import DrawnTimelineFacts, PagePayload
from memfit.report.html.page_text_table import PageTextTable
from memfit.report.places_in_words import location_in_words
from memfit.report.terminal.advice import NO_ADVICE, advice_heading, advice_outcome, needs_or_needs_at_most
from memfit.report.terminal.layout import ReportTable
from memfit.report.terminal.longest_batch import longest_batch_lines
from memfit.report.terminal.notes import figures_outside_allocator
from memfit.report.terminal.rank_table import peak_range_line, rank_table
from memfit.report.terminal.summary import (
    MACHINES,
    growth_in_words,
    stage_table,
    warnings_of_run_stages,
    what_ran_on_what,
)
from memfit.report.terminal.verdict import verdict_of_run, why_no_more_advice
from memfit.units import GIB, MIB, format_bytes, format_gib

_WIDTH = 1000  # width of the bar in SVG units; the page scales it
TOTALS = ("allocated", "reserved", "process")
_KINDS = {"fits": "good", "tight": "unsure", "may not fit": "unsure", "unknown": "unsure"}
"""The colour of a verdict; that of the others is ``bad``."""


def verdict_html_parts(result: DryRun, words: PageTextTable) -> dict[str, str]:
    """Return the parts of the verdict: its word, what follows it, the subject and the peak."""
    found = verdict_of_run(result)
    lines = [part for part in (found.after, " · ".join(found.figures), *found.lines) if part]
    return {
        "kind": _KINDS.get(result.verdict, "bad"),
        "verdict": words.html(found.word.capitalize()),
        "needs": "<br>".join(words.html(line) for line in lines),
        "subject": words.html(what_ran_on_what(result).plain),
        "script": words.html(command_as_typed(result.command)[0] if result.command else result.device.name),
        "peak": words.html(location_in_words(result.peak_place)),
        "growth": words.html(growth_in_words(result).plain),
    }


def allocated_to_capacity_html(result: DryRun) -> str:
    """Return the figures from allocated to the capacity, each with its bytes and their provenance."""
    figures = {term.name: term.figure for term in result.terms}
    device = result.device
    total = device.total
    rungs = [
        _rung(name, figures[name], _FOLLOWS[name])
        for name in TOTALS
        if name != "process" or total.bytes  # a snapshot has neither device nor context
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
    if result.ran_out and result.out_of_memory is not None:
        return f"{format_bytes(result.out_of_memory.requested)} more requested"
    return f"leaves {format_gib(left)}" if left >= 0 else f"short {format_gib(-left)}"


_FOLLOWS = {
    "allocated": "peak held by tensors",
    "reserved": "peak with PyTorch's cache",
    "process": "with the CUDA context: nvidia-smi",
}


def _rung(name: str, figure: Figure, follows: str) -> str:
    source = f' title="{escape(figure.source)}"' if figure.source else ""
    return (
        f'<div><dt>{escape(name)}</dt><dd data-bytes="{figure.bytes}"><b>{_amount(figure.bytes)}</b> '
        f'<span class="provenance"{source}>{figure.provenance}</span>'
        f"<small>{escape(follows)}</small></dd></div>"
    )


def _amount(amount: int) -> str:
    return format_gib(amount) if amount >= GIB else f"{amount / MIB:,.2f} MiB"


def _bar(result: DryRun, figures: dict[str, Figure]) -> str:
    """Draw the figures on one scale: the capacity, or the memory needed if that is more."""
    device = result.device
    full = max(device.total.bytes, result.peak_process.bytes + device.in_use, 1)
    context = "CUDA context" if device.nccl is None else "CUDA context and NCCL"
    pieces = [
        ("allocated", "allocated", figures["allocated"].bytes),
        ("cached", "cached, not allocated", figures["reserved"].bytes - figures["allocated"].bytes),
        ("context", context, result.peak_process.bytes - figures["reserved"].bytes),
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
    label = ", ".join(f"{name} {format_bytes(amount)}" for _, name, amount in pieces)
    keys = [(kind, name) for kind, name, amount in pieces if amount]
    if device.total.bytes and device.total.bytes < full:
        keys.append(("capacity", "capacity"))
    legend = "".join(f'<span><i class="is-{kind}"></i>{escape(name)}</span>' for kind, name in keys)
    return (
        f'<svg class="scale" viewBox="0 0 {_WIDTH} 14" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}, of {format_bytes(full)}">{"".join(drawn)}</svg>'
        f'<p class="key legend">{legend}</p>'
    )


def peak_terms_html(result: DryRun) -> str:
    """Return the rows that sum to the peak of the process."""
    rows = []
    for term in result.terms:
        kind = " class=total" if term.is_total else ""
        amount = term.figure.bytes
        rows.append(
            f'<tr{kind}><th scope="row">{escape(term.name)}</th><td data-bytes="{amount}">{amount:,}</td>'
            f"<td>{format_bytes(amount)}</td><td>{term.figure.provenance}</td></tr>"
        )
    return "".join(rows)


def rank_table_html(result: DryRun, words: PageTextTable) -> str:
    """Return the table of a job's ranks, as the terminal shows it; empty if memfit ran one rank."""
    if not result.ranks:
        return ""
    caption = f"Every rank; the rest of this page is about rank {result.ranks[0].rank}"
    return ledger_html("ranks", caption, rank_table(result.ranks), words)


def stage_table_html(result: DryRun, words: PageTextTable) -> str:
    """Return the table of a run's stages, as the terminal shows it; empty if memfit knows no stages of it."""
    if not result.stages:
        return ""
    below = "".join(f"<p>{words.html(text)}</p>" for text in warnings_of_run_stages(result))
    return ledger_html("stages", "Stages of the run", stage_table(result), words) + below


def ledger_html(kind: str, caption: str, table: ReportTable, words: PageTextTable) -> str:
    """Return a table of figures whose rows are named by their first cell and end with a place."""
    heads = "".join(f'<th scope="col">{heading}</th>' for heading in table.headings)
    rows = []
    for row in table.rows:
        name, *figures, place = row.cells
        sizes = [f' data-bytes="{cell.bytes}"' * (cell.bytes is not None) for cell in figures]
        cells = [f"<td{size}>{escape(cell.text)}</td>" for size, cell in zip(sizes, figures, strict=True)]
        rows.append(
            f'<tr{" class=total" * row.marked}><th scope="row">{escape(name.text)}</th>{"".join(cells)}'
            f'<td><span class="long">{words.html(place.text)}</span></td></tr>'
        )
    return (
        f'<table class="ledger {kind}"><caption>{caption}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def longest_batches_html(result: DryRun, words: PageTextTable) -> str:
    """Return what the terminal says about the batches that memfit looked through."""
    return "".join(f"<p>{words.html(text.plain.strip())}</p>" for text in longest_batch_lines(result))


def moment_buttons_html(found: PagePayload, words: PageTextTable) -> str:
    """Return a button for each of the shortcuts."""
    buttons: list[str] = []
    for moment, one in zip(found.facts.shortcuts, found.shortcuts, strict=True):
        most = max(found.shortcuts[0].allocated, 1)
        below = f"&minus;{100 - 100 * one.allocated / most:.1f} %"
        name = below if buttons else f"Peak {_amount(one.allocated)}"
        step = f" · step {one.place.step}" if one.place.step else ""
        place = one.place if words.source else replace(one.place, line="")
        buttons.append(
            f'<button type="button" data-moment="{moment}" '
            f'title="{_amount(one.allocated)} · {words.html(location_in_words(place))}">'
            f"{name} {one.place.phase}{step}</button>"
        )
    return "".join(buttons)


def advice_html(result: DryRun, words: PageTextTable) -> str:
    """Return the advice, as the terminal shows it; empty if it was not requested."""
    if result.advice is None:
        return ""
    rest = words.html(why_no_more_advice(result)) or NO_ADVICE * (not result.advice)
    rest = "".join(
        f'<p class="peak">{line}</p>'
        for line in (*(words.html(remark) for remark in result.advice_remarks), rest)
        if line
    )
    if not result.advice:
        return rest
    items = [
        f"<li><b>{words.html(' + '.join(one.changes))}</b> saves {format_bytes(one.saves.bytes)} "
        f'<span class="provenance">{one.saves.provenance}</span> · '
        f"{needs_or_needs_at_most(result)} {format_bytes(one.needs.bytes)}"
        f"{' · ' * (one.fits is not None)}{advice_outcome(result, one)} "
        + "".join(f'<code class="long">{words.html(line)}</code> ' for line in (*one.how, one.where) if line)
        + f"<small>costs {words.html(one.costs)}</small></li>"
        for one in result.advice
    ]
    title = f"<h2>What to do next <small>{advice_heading(result)}</small></h2>"
    return f'{title}<ol class="advice">{"".join(items)}</ol>{rest}'


def layer_sums_html(facts: DrawnTimelineFacts) -> str:
    """Return a row for each layer of the stack, and for their sums; the page's script fills them in."""
    kinds = [
        (layer.name, layer.provenance, f"<i {_SWATCH.format(layer.name)}></i>")
        for layer in reversed(facts.layers)
    ]
    least = kinds[0][1]  # the provenance of rounding, which includes that of all layers
    rows = [*kinds, *((name, least, "") for name in ("allocated", "cached", "reserved"))]
    return "".join(
        f'<tr data-row="{name}"><th scope="row">{swatch}{name}{_unless_exact(provenance)}</th>'
        "<td></td><td></td></tr>"
        for name, provenance, swatch in rows
    )


_SWATCH = 'class="swatch" data-layer="{}" aria-hidden="true"'
_HATCH = "repeating-linear-gradient(135deg, transparent 0 2.6px, rgba(255, 255, 255, .62) 2.6px 4.2px), "


def _unless_exact(provenance: Provenance) -> str:
    return f' <span class="provenance">{provenance}</span>' if provenance is not Provenance.EXACT else ""


def layer_colours_css(facts: DrawnTimelineFacts) -> str:
    """Return the styles of the layers; on hatching, text gets a plain background."""
    return "".join(
        f'[data-layer="{one.name}"] {{ --fill: {_HATCH * one.hatched}{one.colour}; '
        f"--text: {'#fff' if one.name == CATEGORY_NAMES[Category.PARAMETER] else '#111'}; "
        f"--ground: {'rgba(255, 255, 255, .8)' if one.hatched else 'none'} }}\n"
        for one in facts.layers
    )


def combined_blocks_html(facts: DrawnTimelineFacts) -> dict[str, str]:
    """Return the texts about blocks that are drawn together, if there are any."""
    hole = "hole, or small blocks drawn together" if facts.together else "hole"
    thinned_text = (
        '<p id="thinned" class="thinned">Small and short-lived blocks are drawn together: '
        f"{facts.together:,} of {facts.together + facts.blocks:,}. All totals are exact at the "
        f"{facts.moments:,} moments that are drawn.</p>"
    )
    return {"hole": hole, "thinned": thinned_text if facts.together else ""}


def notes_html(result: DryRun, words: PageTextTable) -> str:
    """Return the sources of what is outside PyTorch's allocator, and each note once, with all its places."""
    places: dict[tuple[str, str], list[str]] = {}
    for note in result.notes:
        where = places.setdefault((note.provenance, note.text), [])
        if note.where:
            where.append(note.where)
    items = [
        f'<li class="long"><span class="provenance">{escape(figure.provenance)}</span> '
        f"{escape(name)}: {words.html(figure.source)}</li>"
        for name, figure in figures_outside_allocator(result).items()
    ]
    items += [
        f'<li class="long"><span class="provenance">{escape(provenance)}</span> {words.html(text)} '
        + "".join(f"<code>{words.html(one)}</code> " for one in where)
        + "</li>"
        for (provenance, text), where in places.items()
    ]
    if result.range is not None:
        items.insert(0, f'<li class="long">{escape(peak_range_line(result.range))}</li>')
    machine = MACHINES.get(result.device.machine)
    if machine is not None:
        items.append(f"<li>{escape(machine)}</li>")
    return "".join(items)


def versions_html(result: DryRun, words: PageTextTable) -> str:
    """Return the versions, the device and the command that produced the figures."""
    rows = {**result.versions, "device": result.device.name, "command": " ".join(result.command)}
    return "".join(
        f'<tr><th scope="row">{words.html(name)}</th>'
        f'<td><span class="long">{words.html(value)}</span></td></tr>'
        for name, value in rows.items()
        if value
    )
