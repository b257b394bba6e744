"""The command line's entry point: parse, run one command, and exit with its code.

Each command calls functions of ``memfit.api`` and prints what they return. Results go to standard output;
progress and errors go to standard error.
Exit codes: 0 measured; 1 does not fit (with ``--fail``), or needs more than the baseline (``check``), or
differs (``verify``); 2 wrong usage; 3 the script could not be run, or not all of it was measured
(INCOMPLETE), or a result could not be written; 128 + N ended by signal N, of which 130 is Ctrl-C.
"""

import io
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Group, Parameter

from memfit.cli.check import check
from memfit.cli.compare import compare
from memfit.cli.diff import diff
from memfit.cli.doctor import doctor
from memfit.cli.dry_run import dry_run
from memfit.cli.explain import explain
from memfit.cli.gpus import gpus
from memfit.cli.max_batch import max_batch
from memfit.cli.pack import pack
from memfit.cli.plan import plan
from memfit.cli.record import record
from memfit.cli.replay import allocator, replay
from memfit.cli.script_arguments import insert_dashes_before_script
from memfit.cli.train import train
from memfit.cli.verify import verify
from memfit.errors import MemfitError, UsageError
from memfit.termination_signals import INTERRUPTED, SignalsAsExceptions
from memfit.versions import __version__

_BROKEN_PIPE = 141  # the exit code of a program that SIGPIPE ended


def _usage(name: str, options: str = "[OPTIONS]") -> str:
    """Return how a command that runs a script is written."""
    command = f"memfit {name} {options}"
    return f"Usage: {command} SCRIPT.py [ARGS...]\n       {command} -m MODULE [ARGS...]"


_PLAN = "--plan plan.json"
_UNDER_TORCHRUN = f"\n       torchrun --nproc-per-node 8 -m memfit train {_PLAN} SCRIPT.py [ARGS...]"
_MORE = Group("More", sort_key=2)
app = App(
    name="memfit",
    group_commands=Group("Commands", sort_key=1),
    help="Find out how much GPU memory a training script will use, before you have the GPU.",
    version=__version__,
    default_parameter=Parameter(negative=""),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app.command(dry_run, name="dry-run", usage=_usage("dry-run"), sort_key=1)
app.command(plan, usage=_usage("plan"), sort_key=2)
app.command(train, usage=_usage("train", _PLAN) + _UNDER_TORCHRUN, sort_key=3)
app.command(record, usage=_usage("record"), group=_MORE)
app.command(compare, usage=_usage("compare"), group=_MORE)
app.command(check, usage=_usage("check"), group=_MORE)
app.command(verify, usage=_usage("verify", _PLAN), group=_MORE)
app.command(max_batch, name="max-batch", usage=_usage("max-batch"), group=_MORE)
app.command(gpus, usage=_usage("gpus --for").replace("Usage:", "Usage: memfit gpus\n      "), group=_MORE)
for command in (explain, diff, replay, allocator, pack, doctor):
    app.command(command, group=_MORE)
for flag in ("--help", "--version"):
    app[flag].group = _MORE


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    sys.exit(run_command(list(sys.argv[1:] if arguments is None else arguments)))


def run_command(tokens: list[str]) -> int:
    """Run a command and return its exit code."""
    try:
        with SignalsAsExceptions():
            return _run(tokens)
    except KeyboardInterrupt as interruption:
        when = str(interruption) or "there was no result yet"
        print(f"memfit: interrupted; {when}.", file=sys.stderr)
        return INTERRUPTED


def _run(tokens: list[str]) -> int:
    """Run a command and return its exit code; errors are printed."""
    from memfit.report.escape_control_characters import escaped

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a bar still shows the figures
    try:
        code = app(insert_dashes_before_script(tokens, app), exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except (CycloptsError, MemfitError) as error:
        own = error if isinstance(error, MemfitError) else error.__cause__  # of what reads an option's text
        if isinstance(own, MemfitError):
            print("memfit: " + "\n".join(map(escaped, str(own).split("\n"))), file=sys.stderr)
            code = own.exit_code
        else:
            print(f"memfit: {error}\nSee memfit {' '.join(tokens[:1])} --help.", file=sys.stderr)
            code = UsageError.exit_code
    except BrokenPipeError:
        code = _BROKEN_PIPE
    return code or 0  # --help returns nothing
