"""Tell the options of memfit from those of the script: memfit's own stand before the script."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from cyclopts import App

from memfit.devices import find_device
from memfit.errors import UnknownDeviceError, UsageError
from memfit.records.command_as_typed import JOB_LOOP
from memfit.run.launchers import LAUNCHERS

_PYTHON = re.compile(r"python[0-9.]*")
_JOB = re.compile(r".+\.py:[^/:]+")
_LONGEST_SCRIPT = 1 << 20
"""Bytes of a script that is searched for its options."""


def insert_dashes_before_script(tokens: list[str], app: App) -> list[str]:
    """Insert ``--`` before the script, so that options after it belong to the script, as with python.

    >>> from memfit.cli.main import app
    >>> insert_dashes_before_script(["dry-run", "--steps", "2", "train.py", "--epochs", "9"], app)
    ['dry-run', '--steps', '2', '--', 'train.py', '--epochs', '9']
    >>> insert_dashes_before_script(["plan", "job.py:make_job"], app)
    ['plan', '-m', '--', 'memfit.train.job_loop', 'job.py:make_job']
    >>> insert_dashes_before_script(["dry-run", "--", "train.py", "--steps", "9"], app)
    ['dry-run', '--', 'train.py', '--steps', '9']
    """
    _refuse_what_is_no_command(tokens, app)
    values_taken = _values_taken(tokens[:1], app)
    if not values_taken:
        return tokens
    position = 1
    while position < len(tokens) and tokens[position].startswith("-") and tokens[position] != "--":
        name, inline, _ = tokens[position].partition("=")
        if name.startswith("--") and name not in {*values_taken, "--help", "--version"}:
            raise UsageError(f"No such option: {name}. See memfit {tokens[0]} --help.")
        position += 1 + (0 if inline else values_taken.get(name, 0))
    if position >= len(tokens) or tokens[position] == "--":
        return tokens
    if _PYTHON.fullmatch(Path(tokens[position]).name):  # memfit runs the script itself
        _, following, *_ = *tokens[position:], ""
        if following == "-m" or following.endswith(".py"):
            return insert_dashes_before_script([*tokens[:position], *tokens[position + 1 :]], app)
        if following.startswith("-"):
            raise UsageError(
                f"The script runs in memfit's own Python: leave out {tokens[position]} {following}. To set "
                "an option of Python, start memfit with it: python -O -m memfit dry-run train.py"
            )
    launchers_own = LAUNCHERS.get(Path(tokens[position]).name, ())
    values_taken = {name: count for name, count in values_taken.items() if name not in launchers_own}
    _refuse_misplaced(tokens, position, values_taken)
    job = _JOB.fullmatch(tokens[position]) and not Path(tokens[position]).exists()
    return [*tokens[:position], *(["-m", "--", JOB_LOOP] if job else ["--"]), *tokens[position:]]


def _refuse_what_is_no_command(tokens: list[str], app: App) -> None:
    """Refuse a script in place of a command; say what to write."""
    if tokens and tokens[0] not in app and (tokens[0].endswith(".py") or tokens[0] in LAUNCHERS):
        typed = shlex.join(tokens)
        raise UsageError(f"No such command: {tokens[0]}. To run a script, write memfit dry-run {typed}")


def _values_taken(command: list[str], app: App) -> dict[str, int]:
    """Return, by the name of each option of a command that runs a script, how many values follow it."""
    if not command or command[0].startswith("-") or command[0] not in app:
        return {}
    arguments = app[command[0]].assemble_argument_collection(default_parameter=app.default_parameter)
    if "command" not in {argument.field_info.name for argument in arguments}:  # it runs no script
        return {}
    return {name: argument.token_count()[0] for argument in arguments for name in argument.names}


def _refuse_misplaced(tokens: list[str], script: int, values_taken: dict[str, int]) -> None:
    """Refuse memfit's options after the script, and show how to write them.

    memfit would pass them to the script, and ignore what they ask for.

    Args:
        tokens: the command line.
        script: the position of the script in it.
        values_taken: for the name of each of memfit's options, how many values follow it.
    """
    following = tokens[script + 1 : script + 3]
    if following[:1] == ["--"] and following[1:] and following[1].partition("=")[0] in values_taken:
        example = shlex.join([*tokens[:script], "--", tokens[script], *tokens[script + 2 :]])
        raise UsageError(f"Write -- before the script, not after it:\n    memfit {example}")
    scripts_own = _options_of(tokens[script:], values_taken)
    moved: list[str] = []
    rest: list[str] = []
    names: dict[str, bool] = {}  # whether the script seems to have an option of this name, too
    position = script + 1
    while position < len(tokens) and tokens[position] != "--":
        name, inline, value = tokens[position].partition("=")
        is_own = name.startswith("-") and name in values_taken
        end = position + 1 + (values_taken[name] if is_own and not inline else 0)
        if is_own:
            names[name] = name in scripts_own
            is_own = not names[name] or (
                name == "--gpu" and _is_device(value or "".join(tokens[end - 1 : end]))
            )
        (moved if is_own else rest).extend(tokens[position:end])
        position = end
    if not names:
        return
    command, before, after = f"memfit {tokens[0]}", tokens[:script], tokens[script:]
    rest += tokens[position:]
    if both := [name for name, is_the_scripts in names.items() if is_the_scripts]:
        raise UsageError(
            f"{command} and the script both seem to have {_listed(both)}. Write the options of memfit first, "
            "then --, then the script with its own options. For example:\n"
            f"    memfit {shlex.join([*before, *moved, '--', tokens[script], *rest])}"
        )
    raise UsageError(
        f"{_listed(names)} must come before the script, like all options of {command}. Write:\n"
        f"    memfit {shlex.join([*before, *moved, tokens[script], *rest])}\n"
        "If the script itself has these options, write -- before the script:\n"
        f"    memfit {shlex.join([*before, '--', *after])}"
    )


def _listed(names: Iterable[str]) -> str:
    """Return names as a list in words.

    >>> _listed(["--gpu", "--steps", "--fail"])
    '--gpu, --steps and --fail'
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _options_of(command: list[str], names: Iterable[str]) -> set[str]:
    """Return which of the names the script writes in quotes, as one that parses them does."""
    for path in (Path(token) for token in command if token.endswith(".py")):
        try:
            text = path.read_text() if path.is_file() and path.stat().st_size <= _LONGEST_SCRIPT else ""
        except (OSError, UnicodeDecodeError):
            continue
        return {name for name in names if re.search(rf"""["']{re.escape(name)}["']""", text)}
    return set()


def _is_device(name: str) -> bool:
    try:
        find_device(name)
    except UnknownDeviceError:
        return False
    return True
