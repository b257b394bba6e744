"""The options that several commands have: each with its help, and how its text is read.

An option of one command stands in that command's signature, and its help in the command's docstring.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter, Token

from memfit.atomic_files import check_output_paths
from memfit.devices import DEFAULT
from memfit.errors import UsageError
from memfit.run.launchers import launched_script

TARGET = Group("The GPU", sort_key=1)
OUTPUT = Group("Output", sort_key=2)
GHOST = Group("What the ghost cannot know", sort_key=3)
_PROBABLY_NOT_BYTES = 1 << 20
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?")


def option_read_by(read: Callable[[str], object]) -> Parameter:
    """Return the parameter of an option whose text a function reads; its errors are shown as they are."""

    def convert(_type: object, tokens: Sequence[Token]) -> object:
        return read(tokens[0].value)

    return Parameter(converter=convert, metavar="STR")


def parse_gpu_memory(text: str) -> int:
    """Return the bytes of a GPU's memory that an option gives, such as ``12GiB``.

    >>> parse_gpu_memory("0"), parse_gpu_memory("1GiB")
    (0, 1073741824)
    """
    from memfit.units import parse_bytes

    amount = parse_bytes(text)
    if _NUMBER.fullmatch(text.strip()) and 0 < float(text) < _PROBABLY_NOT_BYTES:
        raise UsageError(
            f"{text!r} has no unit, so it means {text} bytes. If you mean GiB, write {text.strip()}GiB."
        )
    return amount


def parse_tolerance(text: str) -> float:
    """Return the share that an option gives in percent.

    >>> parse_tolerance("0.5%")
    0.005
    """
    number, percent = text.strip().removesuffix("%").strip(), text.strip().endswith("%")
    if not percent or _NUMBER.fullmatch(number) is None:
        raise UsageError(f"--tolerance {text!r} is not a percentage. Write it like 1% or 0.5%.")
    return float(number) / 100


Script = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]
"""The script and its own arguments."""
Module = Annotated[bool, Parameter(name=["-m", "--module"], help="Run a module, as python -m does.")]
Values = Annotated[
    tuple[str, ...],
    Parameter(
        group=GHOST,
        help="The values that the script gets when it reads from the GPU, as for memfit dry-run. May be "
        "repeated.",
    ),
]
Json = Annotated[
    str | None,
    Parameter(
        group=OUTPUT,
        allow_leading_hyphen=True,
        help="Write the result as JSON to this file. With -, print the JSON instead of the text.",
    ),
]
Html = Annotated[
    Path | None,
    Parameter(
        group=OUTPUT, help="Write an HTML report to this file: a single page that loads no other files."
    ),
]
Labels = Annotated[
    bool,
    Parameter(
        group=OUTPUT,
        negative="--no-labels",
        help="For each allocation, record the module that made it and the phase of the training step. With "
        "--no-labels, memfit records neither; the byte counts are the same either way.",
    ),
]
Notes = Annotated[
    bool,
    Parameter(
        group=OUTPUT,
        help="List every assumption behind the figures. By default, the summary shows only those that may "
        "change a figure by more than 1 %, and says how many others there are.",
    ),
]
ToEnd = Annotated[
    bool,
    Parameter(
        help="Let the script run to its end instead of stopping it. Each recorded allocation takes host "
        "memory, so a long run may need a lot of it."
    ),
]
Output = Annotated[Path | None, Parameter(name=["-o", "--output"], group=OUTPUT)]
Fail = Annotated[bool, Parameter(group=OUTPUT)]
GpuName = Annotated[
    str,
    Parameter(
        help="The GPU to assume: a name that memfit gpus lists, or a MIG slice such as A100-80GB:1g.10gb."
    ),
]
GpuMemory = Annotated[
    int | None,
    option_read_by(parse_gpu_memory),
    Parameter(help="Assume this much GPU memory instead of the GPU's own, for example 12GiB."),
]
_IN_USE = Parameter(
    help="Assume that the desktop or other jobs already use this much GPU memory, for example 1.5GiB."
)
InUse = Annotated[int, option_read_by(parse_gpu_memory), _IN_USE]


@Parameter(name="*", group=TARGET)
@dataclass(frozen=True, kw_only=True)
class TargetGpu:
    """The GPU of a run."""

    gpu: GpuName = DEFAULT
    memory: GpuMemory = None
    in_use: InUse = 0


@Parameter(name="*", group=TARGET)
@dataclass(frozen=True, kw_only=True)
class ReplayTarget:
    """The GPU on which a recorded run is replayed; None for what it was recorded with."""

    gpu: str | None = None
    """Assume this GPU instead of the one that the run was recorded for."""
    memory: GpuMemory = None
    in_use: Annotated[int | None, option_read_by(parse_gpu_memory), _IN_USE] = None


@Parameter(name="*", group=TARGET)
@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """The GPU memory that a script may use."""

    budget: Annotated[int | None, option_read_by(parse_gpu_memory)] = None
    """How much GPU memory the script may use, for example 8GiB. It includes the CUDA context, as with
    memfit dry-run --memory. By default, the memory of the GPU."""
    gpu: GpuName = DEFAULT
    in_use: InUse = 0


@Parameter(name="*", group=TARGET)
@dataclass(frozen=True, kw_only=True)
class JobSize:
    """The processes that run a script, as torchrun would start them."""

    nproc: int = 1
    """Run the script as this many processes on each machine, with a GPU each, as torchrun --nproc-per-node
    would start them."""
    nnodes: int = 1
    """Assume this many machines, each with --nproc processes."""


@Parameter(name="*", group=TARGET)
@dataclass(frozen=True, kw_only=True)
class RankOfJob(JobSize):
    """One of the processes that run a script."""

    rank: int | None = None
    """Which of the processes to run, counted from 0 over all machines. The others do not exist. Default: the
    first one of the machine that a launcher names, or 0."""


def json_output_file(json: str | None) -> Path | None:
    """Return the file that ``--json`` names; None if it names none, or standard output (``-``)."""
    return None if json in (None, "-") else Path(str(json))


def require_plan(name: str, plan: Path | None) -> Path:
    """Return the plan that a command needs.

    Args:
        name: the command's.
        plan: of its option.
    """
    if plan is None:
        raise UsageError(
            f"No plan given. Run memfit {name} --plan plan.json SCRIPT.py; memfit plan -o writes one."
        )
    return plan


def require_script(name: str, command: Sequence[str], files: Mapping[str, str | Path | None]) -> None:
    """Check that a command has a script to run.

    Args:
        name: the command's.
        command: the script and its arguments.
        files: by option, its file: one may have taken the script, or the next option.
    """
    for option, file in files.items():
        if str(file).startswith("--"):
            raise UsageError(f"{option} took {file} as its file. Write memfit {name} {option} FILE {file}.")
    if command:
        return
    for option, file in files.items():
        if str(file).endswith(".py"):
            raise UsageError(
                f"No script given: {option} took {file} as its file. Write "
                f"memfit {name} {option} FILE {file}."
            )
    raise UsageError(f"No script given. Run memfit {name} SCRIPT.py [ARGS...], or use -m MODULE.")


def checked_script_keywords(
    name: str,
    command: Sequence[str],
    outputs: Mapping[str, Path | None],
    *,
    module: bool,
    ranks: JobSize | None = None,
    inputs: Mapping[str, Path | None] | None = None,
) -> dict[str, Any]:
    """Check the script and the files of a command; return the script as memfit's functions take it.

    Args:
        name: the command's.
        command: the script and its arguments, after a launcher or not.
        outputs: by option, the file that it writes.
        module: whether the command names a module.
        ranks: those of the options, for a command that may run a script as one of several processes: the
            environment of a launcher before the script is set, and the launcher is left out.
        inputs: by option, the file that it reads.

    Returns:
        By keyword: ``script``, its own ``arguments``, ``module``, and what ``ranks`` has.
    """
    from memfit.report.terminal.progress_line import show_progress_line

    require_script(name, command, {**outputs, **(inputs or {})})
    keywords: dict[str, Any] = {"module": module}
    if ranks is not None:
        own = (ranks.nproc, ranks.nnodes)
        with show_progress_line() as show:
            launched = launched_script(
                command, module=module, nproc=ranks.nproc, nnodes=ranks.nnodes, on_wait=show
            )
        os.environ.update(launched.environment)
        command = launched.command
        started = (launched.nproc, launched.nnodes)
        if (1, 1) != own != started != (1, 1):
            raise UsageError("Two numbers of processes: give --nproc and --nnodes, or those of the launcher.")
        nproc, nnodes = own if started == (1, 1) else started
        keywords = {**vars(ranks), "module": launched.module, "nproc": nproc, "nnodes": nnodes}
        if isinstance(ranks, RankOfJob) and ranks.rank is None:
            keywords["rank"] = nproc * launched.machine
    script, *arguments = command
    path = Path(*script.split(".")) if keywords["module"] else Path(script)
    if keywords["module"] and not path.is_dir():
        path = path.with_name(f"{path.name}.py")
    check_output_paths(outputs, {"the script": path / "__main__.py" if path.is_dir() else path})
    return {"script": script, "arguments": arguments, **keywords}
