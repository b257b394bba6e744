"""The text of a file with a job."""

import shlex
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from memfit.records import ObservedJob


def text_of_job(job: ObservedJob, command: Sequence[str]) -> str:
    """Return the text of a file that makes a job.

    Args:
        job: its parts.
        command: the script and its arguments.
    """
    clipped = "" if job.max_grad_norm is None else f", max_grad_norm={job.max_grad_norm!r}"
    typed = shlex.join(command)
    script = Path(command[0]).name
    return f'''"""What {script} trains, for memfit.Engine: written by memfit job {typed}{_to_do(job)}"""

{_imports(job.imports)}


def make_job():
{_indented(job.model[:-1])}    model = {job.model[-1]}{_place(job.model_line)}
{_indented(job.prepare)}    optimizer = {job.optimizer}{_place(job.optimizer_line)}
    return memfit.Job(model, optimizer, loss{clipped}, batch=batch)


def loss(model, batch):{_place(job.loss_line)}
{_indented(job.loss)}

def batch(size):
    return {job.batch}
'''


def _to_do(job: ObservedJob) -> str:
    if not job.open:
        return ""
    lines = (
        textwrap.fill(each, 100, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        for each in job.open
    )
    return "\n\nTo do:\n" + "".join(f"{each}\n" for each in lines)


def _imports(found: Iterable[str]) -> str:
    """Return import statements: those of modules first; what comes from one module is one statement."""
    names: dict[str, list[str]] = defaultdict(list)
    for each in sorted({*found, "import torch", "import memfit"}):
        statement, _, name = each.partition(" import ")
        names[statement].append(name)
    lines = [
        f"{statement} import {', '.join(some)}" if some[0] else statement for statement, some in names.items()
    ]
    return "\n".join(sorted(lines, key=lambda line: (line.startswith("from"), line)))


def _place(line: str) -> str:
    return f"  # {Path(line).name}" if line else ""


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)
