"""The command line's entry point: parse, run one command, and exit with its code.

Each command calls functions of ``memfit.api`` and prints what they return. Results go to standard output;
progress and errors go to standard error.
Exit codes: 0 measured; 1 does not fit (with ``--fail``); 2 wrong usage; 3 the script could not be run, or a
result could not be written.
"""

import io
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App, CycloptsError

from memfit.cli import dry_run, record
from memfit.cli.allocator import allocator
from memfit.cli.ctrl_c import CtrlCRaises
from memfit.cli.diff import diff
from memfit.cli.doctor import doctor
from memfit.cli.explain import explain
from memfit.cli.gpus import gpus
from memfit.cli.pack import pack
from memfit.cli.replay import replay
from memfit.errors import INTERRUPTED, MemfitError, UsageError
from memfit.run.launchers import LAUNCHERS
from memfit.versions import __version__

_RUN_A_SCRIPT = ("dry-run", "record")
_BROKEN_PIPE = 141  # the exit code of a program that SIGPIPE ended

app = App(
    name="memfit",
    help="Find out how much GPU memory a training script will use, before you have the GPU.",
    version=__version__,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
app.command(dry_run.dry_run, name="dry-run", usage=dry_run.USAGE)
app.command(record.record, usage=record.USAGE)
for command in (explain, diff, replay, allocator, pack, gpus, doctor):
    app.command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    sys.exit(exit_code_of(list(sys.argv[1:] if arguments is None else arguments)))


def exit_code_of(tokens: list[str]) -> int:
    """Run a command and return its exit code."""
    try:
        with CtrlCRaises():
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
        code = app(_separate_script(tokens), exit_on_error=False, print_error=False)
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


def _separate_script(tokens: list[str]) -> list[str]:
    """Insert ``--`` before the script, so that options after it belong to the script, as with python.

    Raises:
        UsageError: an option before the script is unknown, or an option after it has the name of one of
            memfit's own: without ``--``, it is not clear which of the two the user means.

    >>> _separate_script(["dry-run", "--steps", "2", "train.py", "--epochs", "9"])
    ['dry-run', '--steps', '2', '--', 'train.py', '--epochs', '9']
    >>> _separate_script(["dry-run", "--", "train.py", "--steps", "9"])
    ['dry-run', '--', 'train.py', '--steps', '9']
    """
    if tokens and tokens[0] not in app and (tokens[0].endswith(".py") or tokens[0] in LAUNCHERS):
        typed = shlex.join(tokens)
        raise UsageError(f"No such command: {tokens[0]}. To run a script, write memfit dry-run {typed}")
    if not tokens or tokens[0] not in _RUN_A_SCRIPT:
        return tokens
    values_taken = {
        name: argument.token_count()[0]
        for argument in app[tokens[0]].assemble_argument_collection()
        for name in argument.names
    }
    position = 1
    while position < len(tokens) and tokens[position].startswith("-") and tokens[position] != "--":
        name, inline, _ = tokens[position].partition("=")
        if name.startswith("--") and name not in {*values_taken, "--help", "--version"}:
            raise UsageError(f"No such option: {name}. See memfit {tokens[0]} --help.")
        position += 1 + (0 if inline else values_taken.get(name, 0))
    if position >= len(tokens) or tokens[position] == "--":
        return tokens
    if Path(tokens[position]).name in LAUNCHERS:  # they have this option as well, for the script's module
        values_taken = {name: count for name, count in values_taken.items() if name not in ("-m", "--module")}
    _refuse_misplaced(tokens, position, values_taken)
    return [*tokens[:position], "--", *tokens[position:]]


def _refuse_misplaced(tokens: list[str], script: int, values_taken: dict[str, int]) -> None:
    """Refuse memfit's options after the script, and show both ways to write them.

    memfit would pass them to the script, and ignore what they ask for.

    Args:
        tokens: the command line.
        script: the position of the script in it.
        values_taken: for the name of each of memfit's options, how many values follow it.
    """
    moved: list[str] = []
    rest: list[str] = []
    names: list[str] = []
    position = script + 1
    while position < len(tokens) and tokens[position] != "--":
        name, inline, _ = tokens[position].partition("=")
        is_own = name.startswith("-") and name in values_taken
        end = position + 1 + (values_taken[name] if is_own and not inline else 0)
        (moved if is_own else rest).extend(tokens[position:end])
        names += [name] * is_own
        position = end
    if names:
        before, after = tokens[:script], tokens[script:]
        rest += tokens[position:]
        raise UsageError(
            f"{' '.join(names)} must come before the script, like all options of memfit {tokens[0]}. Write:\n"
            f"    memfit {shlex.join([*before, *moved, tokens[script], *rest])}\n"
            "If the script itself has these options, write -- before the script:\n"
            f"    memfit {shlex.join([*before, '--', *after])}"
        )
