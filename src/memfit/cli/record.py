"""``memfit record``."""

from pathlib import Path

from memfit.cli.command_output import exit_code_of_run, show_script_progress, write_result, written_trace_file
from memfit.cli.options import (
    Fail,
    Json,
    Labels,
    Module,
    Notes,
    Output,
    Script,
    ToEnd,
    checked_script_keywords,
    json_output_file,
)
from memfit.errors import UsageError
from memfit.run.options import STEPS, RunOptions


def record(
    *command: Script,
    module: Module = False,
    steps: int = STEPS,
    to_end: ToEnd = False,
    output: Output = None,
    json: Json = None,
    fail: Fail = False,
    labels: Labels = True,
    notes: Notes = False,
) -> int:
    """Run a script on this machine's GPU and report the GPU memory it used.

    The script actually trains until memfit stops it after a few training steps. memfit records every
    allocation made by PyTorch's allocator, and reads from the driver how much memory the process holds
    outside PyTorch's allocator. It saves the trace, which memfit explain can read on any machine.

    Args:
        steps: Stop the script after this many training steps.
        output: Save the trace to this file. The default is run.memfit. memfit overwrites an existing
            run.memfit only if you name it with this option.
        fail: Exit with code 1 unless the verdict is FITS.
    """
    from memfit.api.dry_run_record_estimate import run_on_card

    trace = Path("run.memfit") if output is None else output
    outputs = {"-o": trace, "--json": json_output_file(json)}
    script = checked_script_keywords("record", command, outputs, module=module)
    if output is None and trace.exists():
        raise UsageError(
            f"{trace} already exists. Name another file with -o, or overwrite the existing one with "
            f"-o {trace}."
        )
    options = RunOptions(
        module=module,
        steps=None if to_end else steps,
        labels=labels,
        stdout_to_stderr=json == "-",
    )
    with show_script_progress(options.steps) as show:
        run = run_on_card(script["script"], script["arguments"], options, output=trace, on_progress=show)
    write_result(run.result, json, written_trace_file(trace, run), notes=notes)
    return exit_code_of_run(run.result, fail=fail)
