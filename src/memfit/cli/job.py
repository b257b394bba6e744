"""``memfit job``."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from memfit.cli.console import progress, write_job
from memfit.cli.options import OUTPUT, expect_script
from memfit.run.options import STEPS

USAGE = "Usage: memfit job [OPTIONS] SCRIPT.py [ARGS...]\n       memfit job [OPTIONS] -m MODULE [ARGS...]"
_RUNS = (
    "memfit: running the script, and then the job, without terminal input and with their output hidden. The "
    "script writes its output files again."
)


def job(
    *command: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    module: Annotated[bool, Parameter(name=["-m", "--module"], negative="")] = False,
    output: Annotated[Path | None, Parameter(name=["-o", "--output"], group=OUTPUT)] = None,
) -> int:
    """Write a job for a script: a function that returns its model, optimizer and loss, for memfit.Engine.

    memfit watches the unmodified script on the ghost up to its first update, and writes make_job from the
    script's own source. Then it runs both on the ghost, and compares their peaks. What it cannot read is
    named, for you to write.

    Args:
        command: The script and its own arguments.
        module: Run a module, as python -m does.
        output: The file to write. It must not exist. By default, job.py beside the script, whose classes and
            functions it imports.
    """
    from memfit import api

    expect_script("job", command, {"-o": output})
    with progress(STEPS, reruns=_RUNS) as show:
        result = api.scaffold_job(command[0], command[1:], output=output, module=module, on_progress=show)
    write_job(result)
    return 0
