"""What benchmarks share: the command line, runs of memfit, times in turns, and tables."""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from memfit.ghost.runtime_bindings import GhostRuntime

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
MIB, GIB = 1 << 20, 1 << 30
MEMFIT = (sys.executable, "-m", "memfit")
_T = TypeVar("_T")
_ghosts: list["GhostRuntime"] = []
"""Alive, because the runtime calls back into them."""


# ---- The command line and the results --------------------------------------------------------------------


def command_line(doc: str | None, *, results: bool = False) -> argparse.ArgumentParser:
    """Return a parser whose help is the script's docstring; ``results`` adds ``--json FILE``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if results:
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    return parser


def at_least_1(text: str) -> int:
    """Read a number of runs, rounds or operations."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def parts(text: str) -> list[str]:
    """Read an option whose parts are separated by commas."""
    return text.split(",")


def write_json(path: Path | None, results: object) -> None:
    """Write results to the file of ``--json``, if one is given."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


def write_or_print(path: Path | None, text: str) -> None:
    """Write a text to the file of ``--markdown``; print it if none is given."""
    if path is None:
        print(text)
    else:
        path.write_text(text)


# ---- Tables ----------------------------------------------------------------------------------------------


def table_head(columns: Sequence[str], align: str) -> str:
    """Return the first two lines of a Markdown table.

    Args:
        columns: the headings.
        align: a letter for each column: ``l`` for text, ``r`` for numbers.
    """
    ruler = "".join("---|" if letter == "l" else "--:|" for letter in align)
    if len(align) != len(columns):
        raise ValueError(f"{len(columns)} columns are aligned by {align!r}")
    return f"{table_line(columns)}\n|{ruler}"


def table_line(cells: Iterable[object]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(columns: Sequence[str], align: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table, without an end of line."""
    return "\n".join((table_head(columns, align), *map(table_line, rows)))


# ---- Times -----------------------------------------------------------------------------------------------


def in_turns(ways: Mapping[str, Callable[[], _T]], rounds: int) -> Iterator[dict[str, _T]]:
    """Call every way once in each round, and yield the results of a round by the ways' names.

    Each round begins with the next way: the speed of a shared machine changes from second to second.
    """
    names = [*ways]
    for number in range(rounds):
        turn = number % len(names)
        found = {name: ways[name]() for name in (*names[turn:], *names[:turn])}
        yield {name: found[name] for name in names}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the order statistics between which the median lies with 95 %."""
    ordered, count = sorted(values), len(values)
    below = max(math.floor(count / 2 - 0.98 * math.sqrt(count)), 0)
    return ordered[below], ordered[count - 1 - below]


def seconds_of(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that a call takes."""
    began = clock()
    call()
    return clock() - began


@dataclass(frozen=True, slots=True)
class MeasuredProcess:
    """What a process and those that it waited for took."""

    seconds: float
    """Wall time."""
    processor_seconds: float
    host_bytes: int
    """The largest peak of resident memory of any one process."""


def measured(command: Sequence[str], environment: Mapping[str, str] | None = None) -> MeasuredProcess:
    """Run a command, whose output is dropped.

    Raises:
        SystemExit: it failed.
    """
    began = time.perf_counter()
    child = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
    )
    _, status, used = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return MeasuredProcess(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


# ---- memfit and the ghost --------------------------------------------------------------------------------


def memfit_json(
    command: str,
    *arguments: str,
    launcher: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    seconds: float | None = None,
) -> tuple[Any, "subprocess.CompletedProcess[str]"]:
    """Run a command of memfit; return its JSON, None if it wrote none, and the process with its output.

    Args:
        command: such as ``dry-run``.
        arguments: its options, the script and the script's arguments.
        launcher: options of Python that start memfit, such as ``-m torch.distributed.run``.
        environment: variables in addition to this process's.
        folder: the working folder; by default a new one.
        seconds: the time limit.

    Raises:
        subprocess.TimeoutExpired: the time limit is over.
    """
    with tempfile.TemporaryDirectory() as new:
        answer = Path(new, "answer.json")
        done = subprocess.run(
            [MEMFIT[0], *launcher, *MEMFIT[1:], command, "--json", str(answer), *arguments],
            env={**os.environ, **(environment or {})},
            cwd=folder or new,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
        return (json.loads(answer.read_text()) if answer.exists() else None), done


def with_packages(wheels: Sequence[str]) -> dict[str, str]:
    """Return variables under which Python finds these versions first; install them aside if necessary.

    They are not checked against what else is installed, and bring nothing with them.

    >>> with_packages(())
    {}
    """
    if not wheels:
        return {}
    folder = ROOT / "build" / "packages" / "+".join(sorted(wheels))
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as new:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
            subprocess.run([*command, f"{new}/all", *wheels], check=True)
            Path(new, "all").rename(folder)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def lacks_steps(answer: Mapping[str, Any], *, trains: bool = False) -> bool:
    """Return whether a script made no training step in a dry run that fits, although it was to make some.

    Args:
        answer: the JSON of the run.
        trains: whether the script is known to train; otherwise, whether it ran backward passes tells.

    >>> idle = {"verdict": "fits", "steps": 0, "notes": [{"text": "no training step (3 backward passes)"}]}
    >>> lacks_steps(idle), lacks_steps(idle | {"steps": 3}), lacks_steps(idle | {"notes": []})
    (True, False, False)
    """
    fits = answer["verdict"] in ("fits", "tight") and not answer["steps"]
    return fits and (trains or any("backward passes)" in note["text"] for note in answer["notes"]))


def traced(*arguments: str, trace: Path) -> None:
    """Dry-run a script, and keep its trace.

    Args:
        arguments: options of ``memfit dry-run``, the script and its arguments.
        trace: the file.

    Raises:
        SystemExit: the run failed.
    """
    command = [*MEMFIT, "dry-run", "-o", str(trace), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def load_ghost(gpu: str = "A100-80GB", total: int | None = None, *, context: bool = False) -> "GhostRuntime":
    """Load the ghost in this process, before PyTorch.

    Args:
        gpu: a name of the device table.
        total: its memory in bytes, if not the table's.
        context: whether the CUDA context takes memory.
    """
    from memfit.devices import find_device
    from memfit.ghost.build.runtime_library import build_ghost
    from memfit.ghost.ghost_device import GhostDevice
    from memfit.ghost.load_ghost import load

    device = find_device(gpu)
    ghost, taken = load(build_ghost()), device.context_bytes if context else 0
    ghost.configure(GhostDevice.of(device, total), in_use=taken, context=taken)
    _ghosts.append(ghost)
    return ghost
