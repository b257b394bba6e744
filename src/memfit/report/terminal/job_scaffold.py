"""A job that memfit wrote for a script, on the terminal: how it compares, and what is left to do."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from memfit.records import JobScaffold
from memfit.records.targets import typed
from memfit.report.escape import escaped
from memfit.report.printable import Printable
from memfit.units import format_bytes, format_gib


@dataclass(frozen=True, slots=True, repr=False)
class PrintableJobScaffold(Printable, JobScaffold):
    """A job scaffold that prints itself."""

    def show(self, console: Console) -> None:
        """Print the scaffold."""
        print_job_scaffold(self, console)


def print_job_scaffold(result: JobScaffold, console: Console) -> None:
    """Print how a job compares with its script, and what is left to do."""
    script, path = Path(typed(result.command)[0]).name, escaped(result.path)
    console.print(Text(f"WROTE {path}   {escaped(_comparison(result, script))}", style="bold"))
    if result.job.open:
        console.print()
        console.print(Text("To do there:"))
        for each in result.job.open:
            console.print(Text(f"  - {escaped(each)}"))
    console.print()
    target = shlex.join([f"{result.path}:make_job", *result.arguments])
    console.print(Text("Read it before you use it: random values stand in for your data. Then:"))
    console.print(Text(f"  memfit plan --budget 8GiB -o plan.json {escaped(target)}"))
    console.print(Text('  memfit.Engine(make_job(), "plan.json")'))


def _comparison(result: JobScaffold, script: str) -> str:
    """Return how the peaks on the ghost compare, or why there are none to compare."""
    if result.job_peak is None:
        return f"It does not run yet: {result.fault}"
    both = f"{format_gib(result.job_peak)} exact at its peak"
    more = result.job_peak - result.script_peak
    if not more:
        return f"{both}, as {script}"
    return f"{both}, {format_bytes(abs(more))} {'more' if more > 0 else 'less'} than {script}"
