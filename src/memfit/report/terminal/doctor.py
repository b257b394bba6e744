"""What ``memfit doctor`` finds, and what a process holds on a card stage by stage, on the terminal."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import sub

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.patching.patches import ReplacedName
from memfit.records import (
    ASSUMED_HOST_TIMES,
    CardContextReport,
    CardContextStage,
    EnvironmentCheck,
    HostTimes,
    KernelMeasurement,
    MachineKind,
)
from memfit.report.escape_control_characters import escaped
from memfit.report.terminal.layout import plain_table
from memfit.timing.kernel_times import KernelFactor
from memfit.units import MIB

_CANNOT_RUN = 3
_FIGURES = ("allocated", "reserved", "process", "outside PyTorch")


def print_diagnosis(findings: Sequence[EnvironmentCheck], console: Console, *, details: bool) -> int:
    """Print one line per finding; return the command's exit code."""
    for finding in findings:
        mark = Text("ok   ", style="green") if finding.serves else Text("FAILS", style="bold red")
        console.print(Text.assemble(mark, f" {finding.name:9} {finding.text}"))
        if details:
            for line in finding.details:
                console.print(Text(f"                  {line}", style="dim"))
    return 0 if all(finding.serves for finding in findings) else _CANNOT_RUN


def print_patched_names(names: Sequence[ReplacedName], console: Console) -> int:
    """Print one line per name and purpose; return the command's exit code: an error if a name is missing."""
    width = max(len(each.state) for each in names)
    missing = [each for each in names if each.state == "absent" and not each.optional]
    for each in names:
        style = "bold red" if each in missing else "green" if each.state == "present" else "dim"
        more = "; ".join(filter(None, (each.source, each.optional)))
        line = f" {each.name}: to {each.why}" + (f" ({more})" if more else "")
        console.print(Text.assemble((f"{each.state:{width}}", style), line))
    console.print(f"{len({each.name for each in names}):,} names, {len(missing)} missing")
    return _CANNOT_RUN if missing else 0


def print_context_stages(report: CardContextReport, console: Console) -> None:
    """Print what the process held after each stage, and what it held at the end with each change."""
    versions = f"driver {report.driver or 'unknown'} (CUDA {report.cuda}) · torch {report.torch}"
    console.print(Text(f"{escaped(report.card)} · {escaped(versions)}", style="bold"))
    console.print(_stages(report))
    console.print()
    console.print(_trials(report))
    for trial in report.trials:
        console.print(Text(f"{trial.what}: {trial.why}.", style="dim"))
    console.print(Text(f"All figures are in MiB. The column 'process' shows {report.way}.", style="dim"))
    if report.machine is MachineKind.REHEARSAL:
        console.print(
            "REHEARSAL: memfit's ghost stood in for the GPU. Nothing was measured, and nothing is saved."
        )


def print_host_times(times: HostTimes, console: Console) -> None:
    """Print the seconds that this machine's host takes for one of each thing that a step has."""
    table = plain_table("wrw", "the host takes for one of", "µs", "")
    for name, seconds in asdict(times.one).items():
        table.add_row(name.replace("_", " "), f"{1e6 * seconds:.1f}", times.provenance(name))
    console.print(table)
    console.print(Text(f"Measured: {times.source}. Assumed: {ASSUMED_HOST_TIMES.source}.", style="dim"))


def print_kernel_times(
    measured: KernelMeasurement, factors: Mapping[str, KernelFactor], console: Console
) -> None:
    """Print by kind of kernel how much longer they took than predicted, and what did not run."""
    console.print(Text(f"\n{escaped(measured.card)} · torch {escaped(measured.torch)}", style="bold"))
    table = plain_table("wrrr", "kernels", "timed", "measured / predicted", "nine of ten within")
    for kind, factor in factors.items():
        table.add_row(kind, f"{factor.kernels}", f"{factor.ratio:.2f}", f"{factor.spread:.0%}")
    console.print(table)
    for each in measured.skipped:
        console.print(Text(f"not timed: {escaped(each)}", style="dim"))


def kernel_toml_lines(measured: KernelMeasurement, card: str, factors: Mapping[str, KernelFactor]) -> str:
    """Return a card's factors as lines of TOML; they name no person and no machine."""
    driver = f", driver {measured.driver}" if measured.driver else ""
    versions = f"torch {measured.torch.partition('+')[0]}, CUDA {measured.cuda}{driver}"
    lines = [
        f"[measured.{_quoted(card)}]",
        f"source = {_quoted(f'memfit doctor --time, {measured.day}, {versions}')}",
    ]
    for kind, factor in factors.items():
        figures = f"ratio = {factor.ratio:.3f}, spread = {factor.spread:.3f}, kernels = {factor.kernels}"
        lines.append(f"{_quoted(kind)} = {{ {figures} }}")
    return "\n".join(lines)


def context_toml_lines(report: CardContextReport) -> str:
    """Return a card's measurement as lines for ``devices.toml``; they name no person and no machine."""
    source = f"memfit doctor --context, {report.day}"
    facts = {
        "torch": report.torch.partition("+")[0],
        "cuda": report.cuda,
        "driver": report.driver,
        "source": source,
    }
    card = _quoted(report.card)
    known = "".join(f", {name} = {_quoted(fact)}" for name, fact in facts.items() if fact)
    stages = {"bare": report.stages[0], "after work": report.stages[-1]}
    return "\n".join(
        f"    {{ card = {card}, what = {_quoted(what)}, mib = {round(stage.outside / MIB)}{known} }},"
        for what, stage in stages.items()
    )


def _quoted(text: str) -> str:
    """Return a text as TOML writes it: JSON's escapes are among TOML's."""
    return json.dumps(text)


def _stages(report: CardContextReport) -> Table:
    table = plain_table("wrrrr", "after the", *_FIGURES)
    for stage in report.stages:
        table.add_row(stage.what, *(f"{figure / MIB:,.1f}" for figure in _figures(stage)))
    return table


def _trials(report: CardContextReport) -> Table:
    table = plain_table("wrrrr", "at the end, with", *_FIGURES)
    last = _figures(report.stages[-1])
    for trial in report.trials:
        if not trial.stages:
            table.add_row(
                trial.what,
                f"failed: {escaped((trial.failed.splitlines() or ['no output'])[-1])}",
            )
            continue
        changes = map(sub, _figures(trial.stages[-1]), last)
        table.add_row(trial.what, *(f"{change / MIB:+,.1f}" for change in changes))
    return table


def _figures(stage: CardContextStage) -> tuple[int, int, int, int]:
    return stage.allocated, stage.reserved, stage.process, stage.outside
