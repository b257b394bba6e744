"""Render the result of validate.py as Markdown."""

from collections.abc import Mapping
from typing import Any

from measuring import MIB, table, table_head, table_line

SHOWN = 6
"""Largest number of one-sided requests shown per job and side; the JSON lists more."""


def markdown(result: Mapping[str, Any]) -> str:
    """Return the table for one card."""
    rehearsal = result["machine"] == "rehearsal"
    lines = [
        f"# {'REHEARSAL, nothing was measured: ' * rehearsal}{_versions(result)}",
        "",
        f"memfit {result['memfit']}, {result['day']}; the ghost simulates a {result['profile']}.",
        f"{result['steps']} training steps. In MiB; a difference is the ghost's figure minus the card's.",
        "",
        *_context(result["context"]),
        "",
        *_calibration(result["calibration"]),
        "",
        *_jobs(result.get("jobs", {})),
    ]
    return "\n".join(lines) + "\n"


def _versions(result: Mapping[str, Any]) -> str:
    return f"{result['card']}, driver {result['driver'] or 'unknown'}, torch {result['torch']}"


def _context(context: Mapping[str, Any]) -> list[str]:
    rows = (
        (stage["what"], *map(mib, (stage["allocated"], stage["reserved"], stage["process"], outside)))
        for stage, (_, outside) in zip(context["stages"], context["outside"], strict=True)
    )
    columns = ("after the", "allocated", "reserved", "process", "outside")
    return [f"Outside PyTorch's allocator ({context['way']}):", "", table(columns, "lrrrr", rows)]


def _calibration(measured: Mapping[str, Any]) -> list[str]:
    if "failed" in measured:
        return [f"The card's own figures could not be measured: {measured['failed']}"]
    sizes = ", ".join(
        f"{row['requested']:,} → {row['each']:,.0f} (the first {row['first']:,})"
        for row in measured["cudaMalloc"]
    )
    return [
        f"Total: {measured['total_by_cudaMemGetInfo']:,} B by cudaMemGetInfo,",
        f"{measured['total_by_properties']:,} B by device properties. cuDNN {measured['cudnn']}.",
        f"Bytes that cudaMalloc takes per request, the mean of 64: {sizes}.",
    ]


def _jobs(jobs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    columns = ("job", "allocated", "diff.", "reserved", "diff.", "process", "diff.", "events")
    lines, details = [table_head(columns, "lrrrrrrl")], []
    for name, job in jobs.items():
        if job["status"] != "done":
            lines.append(table_line((name, f"{job['status']}: {job['why'].splitlines()[0]}", *[""] * 6)))
            continue
        card, ghost, differs = job["card"], job["ghost"], job["difference"]
        cells: list[str] = []
        for figure in ("allocated", "reserved", "process"):
            cells += mib(card[figure]), difference(ghost[figure], card[figure])
        events = "identical" if differs["identical"] else f"{differs['card_events']:,}, different"
        lines.append(table_line((name, *cells, events)))
        details += _details(name, differs)
    return [*lines, *(["", *details] if details else [])]


def _details(name: str, differs: Mapping[str, Any]) -> list[str]:
    if differs["identical"]:
        return []
    lines = [f"- **{name}**: {differs['first']}"]
    for side, requests in (("card", differs["only_card"]), ("ghost", differs["only_ghost"])):
        shown = "; ".join(
            f"{request['count']} x {request['bytes']:,} B "
            f"{' '.join(filter(None, (request['phase'], request['module'], request['op'])))}"
            for request in requests[:SHOWN]
        )
        if shown:
            more = f"; and {len(requests) - SHOWN} more" if len(requests) > SHOWN else ""
            lines.append(f"  - only the {side} requested {shown}{more}")
    return lines


def mib(amount: int) -> str:
    """Format bytes as MiB."""
    return f"{amount / MIB:,.1f}"


def difference(ours: int, theirs: int) -> str:
    """Format the ghost's figure minus the card's, in MiB and percent."""
    if ours == theirs:
        return "0"
    share = f", {100 * (ours - theirs) / theirs:+.1f} %" if theirs else ""
    return f"{(ours - theirs) / MIB:+,.1f}{share}"
