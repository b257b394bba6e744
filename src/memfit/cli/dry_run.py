"""``memfit dry-run``."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from memfit.cli.console import exit_code, print_trace_path, progress, write_result
from memfit.cli.options import GHOST, OUTPUT, TARGET, bytes_or_none
from memfit.errors import UsageError

USAGE = (
    "Usage: memfit dry-run [OPTIONS] SCRIPT.py [ARGS...]\n       memfit dry-run [OPTIONS] -m MODULE [ARGS...]"
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
    values: Annotated[str, Parameter(group=GHOST)] = "",
    fill_host_memory: Annotated[bool, Parameter(negative="", group=GHOST)] = False,
    no_weights: Annotated[bool, Parameter(negative="", group=GHOST)] = False,
    workspaces: Annotated[Literal["cudnn", "rules", "none"], Parameter(group=GHOST)] = "cudnn",
    labels: Annotated[bool, Parameter(group=OUTPUT)] = True,
) -> int:
    """Run a script without a GPU and report the GPU memory it would use.

    The script runs unmodified, as python would run it, on the ghost: a stand-in CUDA runtime. PyTorch's
    allocations are real, but nothing is computed. memfit stops the script after a few training steps.
    Options of memfit come before the script; everything after the script's name is passed to the script.

    Args:
        command: The script and its own arguments.
        module: Run a module, as python -m does.
        gpu: The GPU to stand in for: a name that memfit gpus lists, or a MIG slice (A100-80GB:1g.10gb).
        memory: Use this much GPU memory instead of the GPU's own: 12GiB.
        in_use: GPU memory that the desktop or other jobs already use: 1.5GiB.
        steps: Stop the script after this many training steps.
        output: Save the trace to this file (run.memfit).
        json: Write the result as JSON to this file, or - for standard output.
        html: Write a report for the browser to this file: one page that loads nothing else.
        fail: Exit with code 1 if the script does not fit.
        advise: Look for changes that lower the peak without editing the training loop. memfit tries each
            one in a run of its own (up to about six), silent and without input. Each run of the script
            writes its output files again.
        values: Values the ghost returns when the script reads a GPU value:
            float=1,int=1,bool=false,all=true,count=upper.
        fill_host_memory: Fill large CPU tensors as usual, instead of leaving their pages untouched.
        no_weights: Do not download or read checkpoints in transformers' from_pretrained; create every model
            from its configuration. Without this option, only models whose checkpoint is not on this machine
            are created that way.
        workspaces: Where cuDNN's workspace sizes come from: the installed cuDNN (cudnn; the rules where
            cuDNN cannot answer), memfit's rules only (rules), or count 0 bytes (none).
        labels: Record modules and phases. Byte counts are the same without.
    """
    from memfit import api

    if not command:
        raise UsageError("No script given. Run memfit dry-run SCRIPT.py [ARGS...], or use -m MODULE.")
    for path in (None if json == "-" else json, html):
        if path is not None:
            api.check_output(Path(path))
    with progress(steps) as show:
        result = api.dry_run(
            command[0],
            command[1:],
            module=module,
            gpu=gpu,
            memory=bytes_or_none(memory),
            in_use=bytes_or_none(in_use) or 0,
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
    write_result(result, json)
    if output is not None:
        print_trace_path(output)
    return exit_code(result, fail=fail)
