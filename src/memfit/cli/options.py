"""Groups of options in ``--help``, and option values that several commands read the same way."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cyclopts import Group

from memfit.errors import UsageError
from memfit.run.launchers import LaunchedScript, launched_script

TARGET = Group("The GPU", sort_key=1)
OUTPUT = Group("Output", sort_key=2)
GHOST = Group("What the ghost cannot know", sort_key=3)
_PROBABLY_NOT_BYTES = 1 << 20
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?")


def json_file(json: str | None) -> Path | None:
    """Return the file that ``--json`` names; None if it names none, or standard output (``-``)."""
    return None if json in (None, "-") else Path(str(json))


def expect_script(name: str, command: Sequence[str], files: Mapping[str, str | Path | None]) -> None:
    """Check that a command has a script to run.

    Args:
        name: the command's.
        command: the script and its arguments.
        files: by option, its file: one may have taken the script.

    Raises:
        UsageError: it has none.
    """
    if command:
        return
    for option, file in files.items():
        if str(file).endswith(".py"):
            raise UsageError(
                f"No script given: {option} took {file} as its file. Write "
                f"memfit {name} {option} FILE {file}."
            )
    raise UsageError(f"No script given. Run memfit {name} SCRIPT.py [ARGS...], or use -m MODULE.")


def expect_plan(name: str, plan: Path | None) -> Path:
    """Return the plan that a command needs.

    Args:
        name: the command's.
        plan: of its option.

    Raises:
        UsageError: there is none.
    """
    if plan is None:
        raise UsageError(
            f"No plan given. Run memfit {name} --plan plan.json SCRIPT.py; memfit plan -o writes one."
        )
    return plan


def script_file(script: str, *, module: bool) -> dict[str, Path]:
    """Return the file of a script, or of a module in the working folder, named for ``check_outputs``."""
    path = Path(*script.split(".")) if module else Path(script)
    if module and not path.is_dir():
        path = path.with_name(f"{path.name}.py")
    return {"the script": path / "__main__.py" if path.is_dir() else path}


def bytes_or_none(text: str | None) -> int | None:
    """Return the bytes that an option gives, such as ``12GiB``, or None if the option was not given.

    Raises:
        UsageError: the text is not an amount of memory.

    >>> bytes_or_none("1GiB")
    1073741824
    """
    from memfit.units import parse_bytes

    return None if text is None else parse_bytes(text)


def launched_job(
    command: Sequence[str], nproc: int, nnodes: int, *, module: bool
) -> tuple[LaunchedScript, int, int]:
    """Return the script without the launcher before it, whose environment is set, and numbers of processes.

    Args:
        command: the script and its arguments, after a launcher or not.
        nproc: processes on each machine, of the options.
        nnodes: machines, of the options.
        module: whether the command names a module.

    Raises:
        UsageError: launcher and options both say how many processes there are.
    """
    launched = launched_script(command, module=module)
    os.environ.update(launched.environment)
    if (launched.nproc, launched.nnodes) == (1, 1):
        return launched, nproc, nnodes
    if (nproc, nnodes) != (1, 1):
        raise UsageError("Two numbers of processes: give --nproc and --nnodes, or those of the launcher.")
    return launched, launched.nproc, launched.nnodes


def share(option: str, text: str) -> float:
    """Return the share that an option gives in percent.

    Raises:
        UsageError: the text is not a percentage.

    >>> share("--tolerance", "0.5%")
    0.005
    """
    number, percent = text.strip().removesuffix("%").strip(), text.strip().endswith("%")
    if not percent or _NUMBER.fullmatch(number) is None:
        raise UsageError(f"{option} {text!r} is not a percentage. Write it like 1% or 0.5%.")
    return float(number) / 100


def memory_or_none(text: str | None) -> int | None:
    """Return the bytes of a GPU's memory that an option gives, as ``bytes_or_none`` does.

    Raises:
        UsageError: the text is not an amount of memory, or probably lacks its unit.

    >>> memory_or_none("0")
    0
    """
    amount = bytes_or_none(text)
    if text is not None and _NUMBER.fullmatch(text.strip()) and 0 < float(text) < _PROBABLY_NOT_BYTES:
        raise UsageError(
            f"{text!r} has no unit, so it means {text} bytes. If you mean GiB, write {text.strip()}GiB."
        )
    return amount
