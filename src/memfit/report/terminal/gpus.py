"""The GPUs that memfit knows, and which of them run a script, on the terminal."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.devices import Device
from memfit.records import GpusFor, ScriptPlan
from memfit.records.command_as_typed import command_as_typed
from memfit.report.escape_control_characters import escaped
from memfit.report.terminal.layout import plain_table, print_answer_and_subject, subject_in_words
from memfit.report.terminal.plan_words import plan_changes_in_words
from memfit.timing.kernel_times import Basis
from memfit.units import format_gib, format_seconds

_THOUSAND = 1000


def print_devices(devices: Iterable[Device], console: Console) -> None:
    """Print one row per GPU: its name for --gpu, and the figures that decide whether a job fits."""
    table = Table(box=None, pad_edge=False)
    for heading in ("--gpu", "memory", "sm", "units", "context", "fast dtypes"):
        right = heading not in ("--gpu", "fast dtypes")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for device in devices:
        table.add_row(
            device.name.replace(" ", "-"),  # needs no quotes in a shell
            ("≈ " if "total_bytes" in device.approximate else "") + format_gib(device.total_bytes),
            "{}{}".format(*device.compute_capability),
            str(device.multiprocessors),
            "≈ " + format_gib(device.context_bytes),
            " ".join(dtype for dtype in ("tf32", "bf16", "fp16", "fp8") if device.fast(dtype)) or "none",
        )
    console.print(table)
    console.print("sm: compute capability; units: multiprocessors; context: CUDA's own memory.", style="dim")
    console.print(
        "≈ approximate or assumed; memfit/devices.toml gives the source of every figure.", style="dim"
    )


def print_gpus_for(result: GpusFor, console: Console) -> None:
    """Print which GPUs run a script, and what each needs."""
    written = sum(_as_written(plan) for plan in result.plans)
    planned = sum(plan.chosen is not None for plan in result.plans) - written
    verdict = f"RUNS ON {written} OF {len(result.plans) + len(result.failed)} GPUS as written"
    verdict += f", and on {planned} more with a plan" * bool(planned)
    print_answer_and_subject(verdict, console, subject_in_words(result.command, versions=result.versions))
    console.print(_table(result))
    for reason, names in _by_reason(result).items():
        console.print(f"\n{', '.join(names)}: {reason}")
    if may_fit := [plan.device.name for plan in result.plans if plan.may_fit_as_written]:
        console.print(
            f"\n{', '.join(may_fit)}: the script may fit as written. Where memory is short, PyTorch takes "
            "engines with smaller workspaces for convolutions. memfit dry-run --gpu NAME tells."
        )
    command = escaped(" ".join(command_as_typed(result.command)))
    if result.priced_on:
        console.print(f"\nPrices from tables are of {result.priced_on}.")
    limited = any(plan.step_time is not None and plan.step_time.is_bound_by_host for plan in result.plans)
    for line in (
        "The CUDA context, which is assumed, is included. ~ What is left is less than its uncertainty.",
        "Times and costs are predicted. ±: nine steps of ten should take at most so much more, or less.",
        "* by measurements of a related card; ** by the data sheet. memfit dry-run --gpu NAME says more.",
        *["† As written, the host limits the step: the GPU waits for it over a tenth of the time."] * limited,
        f"The plan for one of them: memfit plan --gpu NAME {command}",
    ):
        console.print(Text(line, style="dim"))


def _by_reason(result: GpusFor) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, reason in result.failed.items():
        found.setdefault(escaped(reason), []).append(name)
    return found


def _as_written(plan: ScriptPlan) -> bool:
    return plan.chosen is not None and not plan.chosen.changes


def _table(result: GpusFor) -> Table:
    total = result.steps_total
    run = {f"{total:,} steps": {name: _time(hours) for name, hours in result.hours.items()}} if total else {}
    if result.prices:
        run["cost" if total else "per 1,000 steps"] = {n: _amount(cost) for n, cost in result.costs.items()}
    headings = ("--gpu", "memory", "as written", "with a plan", "time", "a step", "±", *run, "plan")
    table = plain_table("lrrrrrl" + "r" * len(run) + "w", *headings)
    for plan in result.plans:
        *cells, changes = _cells(plan)
        table.add_row(
            plan.device.name.replace(" ", "-"),
            format_gib(plan.device.total.bytes),
            *cells,
            *(column.get(plan.device.name, "") for column in run.values()),
            changes,
            style="" if plan.chosen is not None else "dim",
        )
    return table


def _time(hours: float) -> str:
    """Return hours in the unit that suits them.

    >>> _time(0.5), _time(1234.5)
    ('30.0 min', '1,234 h')
    """
    return f"{hours:,.0f} h" if hours >= _THOUSAND else format_seconds(hours * 3600)


def _amount(cost: float) -> str:
    """Return an amount of money to three digits.

    >>> _amount(0.01234), _amount(1234.5)
    ('0.0123', '1,234')
    """
    return f"{cost:,.0f}" if cost >= _THOUSAND else f"{cost:.3g}"


_BASIS_MARKS = {str(Basis.RELATIVE): "*", str(Basis.DATA_SHEET): "**"}


def _cells(plan: ScriptPlan) -> tuple[str, ...]:
    """Return what the script needs as written and with a plan, the plan's time, seconds, spread and name."""
    chosen = plan.chosen
    written = f"{_tight(plan, plan.as_written.needs.bytes)}{format_gib(plan.as_written.needs.bytes)}"
    seconds = "" if plan.seconds is None else format_seconds(plan.seconds)
    time = plan.step_time
    spread = ""
    if time and seconds:
        marks = _BASIS_MARKS.get(time.basis, "") + "†" * time.is_bound_by_host
        spread = f"{time.high / time.seconds - 1:.0%}{marks}"
    if chosen is None:
        smallest = plan.smallest or plan.as_written
        return written, format_gib(smallest.needs.bytes), "", "", "", "does not fit"
    if not chosen.changes:
        return written, "", "", seconds, spread, "fits as written"
    needs = f"{_tight(plan, chosen.needs.bytes)}{format_gib(chosen.needs.bytes)}"
    return written, needs, f"{chosen.time:.2f}x", seconds, spread, plan_changes_in_words(chosen)


def _tight(plan: ScriptPlan, needs: int) -> str:
    return "~ " if 0 <= plan.budget - needs < plan.uncertainty else ""
