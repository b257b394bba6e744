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

from cyclopts import App, CycloptsError, Group

from memfit.cli import check, compare, dry_run, gpus, max_batch, plan, record, train, verify
from memfit.cli.allocator import allocator
from memfit.cli.diff import diff
from memfit.cli.doctor import doctor
from memfit.cli.explain import explain
from memfit.cli.pack import pack
from memfit.cli.replay import replay
from memfit.cli.script_arguments import separate_script
from memfit.ctrl_c import INTERRUPTED, SignalsRaise
from memfit.errors import MemfitError, UsageError
from memfit.versions import __version__

_BROKEN_PIPE = 141  # the exit code of a program that SIGPIPE ended

_MORE = Group("More", sort_key=2)
app = App(
    name="memfit",
    group_commands=Group("Commands", sort_key=1),
    help="Find out how much GPU memory a training script will use, before you have the GPU.",
    version=__version__,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app.command(dry_run.dry_run, name="dry-run", usage=dry_run.USAGE, sort_key=1)
app.command(plan.plan, usage=plan.USAGE, sort_key=2)
app.command(train.train, usage=train.USAGE, sort_key=3)
app.command(record.record, usage=record.USAGE, group=_MORE)
app.command(compare.compare, usage=compare.USAGE, group=_MORE)
app.command(check.check, usage=check.USAGE, group=_MORE)
app.command(verify.verify, usage=verify.USAGE, group=_MORE)
app.command(max_batch.max_batch, name="max-batch", usage=max_batch.USAGE, group=_MORE)
app.command(gpus.gpus, usage=gpus.USAGE, group=_MORE)
for command in (explain, diff, replay, allocator, pack, doctor):
    app.command(command, group=_MORE)
for flag in ("--help", "--version"):
    app[flag].group = _MORE


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    sys.exit(exit_code_of(list(sys.argv[1:] if arguments is None else arguments)))


def exit_code_of(tokens: list[str]) -> int:
    """Run a command and return its exit code."""
    try:
        with SignalsRaise():
            return _run(tokens)
    except KeyboardInterrupt as interruption:
        when = str(interruption) or "there was no result yet"
        print(f"memfit: interrupted; {when}.", file=sys.stderr)
        return INTERRUPTED


def _run(tokens: list[str]) -> int:
    """Run a command and return its exit code; errors are printed."""
    from memfit.report.escape import escaped

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a bar still shows the figures
    try:
        code = app(separate_script(tokens, app), exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        print(f"memfit: {error}\nSee memfit {' '.join(tokens[:1])} --help.", file=sys.stderr)
        code = UsageError.exit_code
    except MemfitError as error:
        print("memfit: " + "\n".join(map(escaped, str(error).split("\n"))), file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:
        code = _BROKEN_PIPE
    return code or 0  # --help returns nothing
