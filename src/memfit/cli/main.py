"""The command line: thin. Each command calls one function of api.py and prints what it returns.

Results go to standard output, progress and errors to standard error.
Exit codes: 0 it could be measured; 1 ``--fail`` and it does not fit; 2 usage; 3 the script could not be run.
"""

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Group, Parameter

from memfit.cli import reading
from memfit.cli.console import exit_code, name_trace, progress, stdout, write
from memfit.cli.reading import OUTPUT, TARGET
from memfit.errors import MemfitError, UsageError
from memfit.versions import __version__

app = App(
    name="memfit",
    help="Know what GPU memory a training script will use, without the GPU.",
    version=__version__,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
_GHOST = Group("What the ghost cannot know", sort_key=3)


@app.command(
    name="dry-run",
    usage="Usage: memfit dry-run [OPTIONS] SCRIPT.py [ARGS...]\n"
    "       memfit dry-run [OPTIONS] -m MODULE [ARGS...]",
)
def dry_run(  # noqa: PLR0913 - one parameter an option
    *command: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    module: Annotated[bool, Parameter(name=["-m", "--module"], negative="")] = False,
    gpu: Annotated[str, Parameter(group=TARGET)] = "A100-80GB",
    memory: Annotated[str | None, Parameter(group=TARGET)] = None,
    in_use: Annotated[str, Parameter(group=TARGET)] = "0",
    steps: int = 3,
    output: Annotated[Path | None, Parameter(name=["-o", "--output"], group=OUTPUT)] = None,
    json: Annotated[str | None, Parameter(group=OUTPUT, allow_leading_hyphen=True)] = None,
    html: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    fail: Annotated[bool, Parameter(negative="", group=OUTPUT)] = False,
    advise: Annotated[bool, Parameter(negative="")] = False,
    values: Annotated[str, Parameter(group=_GHOST)] = "",
    fill_host_memory: Annotated[bool, Parameter(negative="", group=_GHOST)] = False,
    no_weights: Annotated[bool, Parameter(negative="", group=_GHOST)] = False,
    workspaces: Annotated[Literal["cudnn", "rules", "none"], Parameter(group=_GHOST)] = "cudnn",
    labels: Annotated[bool, Parameter(group=OUTPUT)] = True,
) -> int:
    """Run a script on the ghost GPU and say what it would use.

    The ghost is a stand-in CUDA runtime: PyTorch's allocations are real, nothing is computed, and no
    GPU is needed. The script runs unmodified, as python would run it, and is ended after a few
    training steps. Options of memfit come before the script; what follows is the script's own.

    Args:
        command: The script and its own arguments.
        module: Run a module, as python -m does.
        gpu: The GPU to stand in for; memfit gpus lists them. A MIG slice: A100-80GB:1g.10gb.
        memory: Memory of the GPU instead of its own: 12GiB.
        in_use: Memory that a desktop or another job already holds: 1.5GiB.
        steps: Training steps after which the script is ended.
        output: Keep the trace in this file (run.memfit).
        json: Write the result as JSON to this file, or - for standard output.
        html: Write a report to look at in a browser, one file that loads nothing, to this file.
        fail: Exit with 1 if it does not fit.
        advise: Say what lowers what it needs, with no change in its loop: each is tried in a run of its own,
            up to about six more, silent and without input. The script writes its files again.
        values: What the script is told when it reads a GPU value:
            float=1,int=1,bool=false,all=true,count=upper.
        fill_host_memory: Fill large CPU tensors as usual, instead of leaving their pages untouched.
        no_weights: Neither download nor read the checkpoints of transformers' from_pretrained, which are made
            up from their configurations. Missing ones are without this option, too.
        workspaces: Who says what cuDNN works in: the installed cuDNN (rules where it cannot be asked), the
            rules alone, or nobody, which counts 0 bytes.
        labels: Record modules and phases. Figures are the same without.
    """
    from memfit import api
    from memfit.units import parse_bytes

    if not command:
        raise UsageError("Which script? memfit dry-run SCRIPT.py [ARGS...], or -m MODULE.")
    for path in (None if json == "-" else json, html):
        if path is not None:
            api.check_output(Path(path))
    with progress(steps) as show:
        result = api.dry_run(
            command[0],
            command[1:],
            module=module,
            gpu=gpu,
            memory=None if memory is None else parse_bytes(memory),
            in_use=parse_bytes(in_use),
            steps=steps,
            values=values,
            host_memory=not fill_host_memory,
            weights=not no_weights,
            workspaces=workspaces,
            labels=labels,
            output=output,
            html=html,
            advise=advise,
            stdout_to_stderr=json == "-",
            on_progress=show,
        )
    write(result, json)
    if output is not None:
        name_trace(output)
    return exit_code(result, fail=fail)


@app.command(
    usage="Usage: memfit record [OPTIONS] SCRIPT.py [ARGS...]\n"
    "       memfit record [OPTIONS] -m MODULE [ARGS...]",
)
def record(
    *command: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    module: Annotated[bool, Parameter(name=["-m", "--module"], negative="")] = False,
    steps: int = 3,
    to_end: Annotated[bool, Parameter(negative="")] = False,
    output: Annotated[Path | None, Parameter(name=["-o", "--output"], group=OUTPUT)] = None,
    json: Annotated[str | None, Parameter(group=OUTPUT, allow_leading_hyphen=True)] = None,
    fail: Annotated[bool, Parameter(negative="", group=OUTPUT)] = False,
    labels: Annotated[bool, Parameter(group=OUTPUT)] = True,
) -> int:
    """Run a script on this machine's GPU and say what it used, as dry-run says what it would.

    PyTorch's own history is recorded, and what the process holds outside PyTorch's allocator is read
    from the driver while the script runs. The script really trains; it is ended after a few training
    steps. The trace is kept: memfit explain reads it anywhere.

    Args:
        command: The script and its own arguments.
        module: Run a module, as python -m does.
        steps: Training steps after which the script is ended.
        to_end: Let the script come to its own end instead. Host memory grows with every allocation.
        output: Keep the trace in this file. By default run.memfit, which is never overwritten.
        json: Write the result as JSON to this file, or - for standard output.
        fail: Exit with 1 if it does not fit.
        labels: Record modules and phases. Figures are the same without.
    """
    from memfit import api

    if not command:
        raise UsageError("Which script? memfit record SCRIPT.py [ARGS...], or -m MODULE.")
    trace = Path("run.memfit") if output is None else output
    if output is None and trace.exists():
        raise UsageError(f"{trace} is there already. Name another file, or this one, with -o.")
    if json is not None and json != "-":
        api.check_output(Path(json))
    wanted = None if to_end else steps
    with progress(wanted) as show:
        result = api.record(
            command[0],
            command[1:],
            module=module,
            steps=wanted,
            labels=labels,
            output=trace,
            stdout_to_stderr=json == "-",
            on_progress=show,
        )
    write(result, json)
    name_trace(trace)
    return exit_code(result, fail=fail)


for command in (reading.explain, reading.diff, reading.replay, reading.allocator, reading.pack):
    app.command(command)


@app.command
def gpus() -> int:
    """List the GPUs that the ghost can stand in for."""
    from memfit.devices import all_devices
    from memfit.report.terminal.devices import print_devices

    print_devices(all_devices(), stdout())
    return 0


@app.command
def doctor(
    *,
    gaps: Annotated[bool, Parameter(negative="")] = False,
    context: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Look whether everything memfit needs is here: torch, a compiler, the ghost.

    Args:
        gaps: List the CUDA functions that the ghost does not stand in for.
        context: Measure on this machine's GPU what a process holds outside PyTorch's allocator, and what
            lowers it. Later dry runs for that GPU use the figure.
    """
    if context:
        return _measure_context()
    from memfit.api import diagnose
    from memfit.report.terminal.doctor import print_diagnosis

    return print_diagnosis(diagnose(), stdout(), details=gaps)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    from memfit.report.escape import inert

    tokens = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a bar still shows the figures
    try:
        code = app(_script_begins(tokens), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        print(f"memfit: {error}\nSee memfit {' '.join(tokens[:1])} --help.", file=sys.stderr)
        code = UsageError.exit_code
    except MemfitError as error:
        print("memfit: " + "\n".join(map(inert, str(error).split("\n"))), file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("memfit: interrupted; nothing was measured.", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # The reader has gone: what is left to write goes nowhere, and Python has nothing to complain of.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)


def _script_begins(tokens: list[str]) -> list[str]:
    """Put ``--`` before the script, so that what follows it is the script's own, as with python.

    >>> _script_begins(["dry-run", "--steps", "2", "train.py", "--steps", "9"])
    ['dry-run', '--steps', '2', '--', 'train.py', '--steps', '9']
    """
    if tokens[:1] not in (["dry-run"], ["record"]):
        return tokens
    takes = {
        name: argument.token_count()[0]
        for argument in app[tokens[0]].assemble_argument_collection()
        for name in argument.names
    }
    position = 1
    while position < len(tokens) and tokens[position].startswith("-") and tokens[position] != "--":
        name, inline, _ = tokens[position].partition("=")
        if name.startswith("--") and name not in {*takes, "--help", "--version"}:
            raise UsageError(f"No such option: {name}. See memfit {tokens[0]} --help.")
        position += 1 + (0 if inline else takes.get(name, 0))
    if position >= len(tokens) or tokens[position] == "--":
        return tokens
    return [*tokens[:position], "--", *tokens[position:]]


def _measure_context() -> int:
    from memfit import api
    from memfit.report.terminal.context import print_context

    report = api.measure_context()
    print_context(report, stdout())
    if kept := api.keep_context(report):
        print(f"Kept for dry runs of this GPU with this torch: {kept}", file=sys.stderr)
    return 0
