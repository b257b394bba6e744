"""Are wrong rules caught? Each rule of memfit's allocator is changed, one at a time.

    python benchmarks/allocator_mutations.py [--operations 800] [--seed N] [--logs DIR] [--json FILE]

PyTorch's real allocator answers random operations once, in every situation of allocator_differential.py;
each changed allocator then has to give the same answers (``differs``). It also does random operations under
the referee (``referee``), or, if it is compiled, the same as ``caching.py`` (``twin``). Exits with 1 if one
is caught by neither, but for those that mutants.toml explains, or if one that it explains is caught.
"""

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from allocator_differential import Options, drive, situations

sys.path.insert(0, str(Path(__file__).with_name("allocator")))
from compiled import replay_compiled
from model import Log, Model
from mutants import Mutant, mutants, mutated, mutated_c
from twins import TWIN_CONFS, compare
from watched import CONFS, run

from memfit.report.terminal.progress_line import progress_line

RUNS = 4  # of the referee, for each conf
STEPS = 250  # of each
LONGEST = 60  # seconds that a changed allocator may take for a log


def record(chosen: list[tuple[str, Options]], folder: Path) -> list[Log]:
    """Record the real allocator's answers; existing logs are reused."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = []
    with progress_line() as show:
        for number, (conf, options) in enumerate(chosen):
            path = folder / f"{number}.npz"
            if not path.exists():
                result = drive(conf, options | {"log": str(path)})
                if result["mismatch"]:
                    raise SystemExit(f"The allocator itself differs under {conf!r}: {result['mismatch']}")
            logs.append(Log.read(path))
            show(f"{len(logs)} of {len(chosen)} situations recorded")
    return logs


def caught(mutant: Mutant, logs: list[Log], enough: int) -> dict[str, Any]:
    """Return how often a mutant was caught, at most ``enough`` times each way, and how the first time."""
    if mutant.compiled:
        with mutated_c(mutant):
            ways: dict[str, Iterator[Callable[[], object]]] = {
                "differs": (partial(apart, partial(replay_compiled, log)) for log in logs),
                "twin": (
                    partial(apart, partial(compare, conf, seed))
                    for seed in range(RUNS)
                    for conf in TWIN_CONFS
                ),
            }
            return counted(mutant, ways, enough)
    with mutated(mutant) as caching:
        ways = {
            "differs": (partial(log.replay, Model(log.situation, caching)) for log in logs),
            "referee": (partial(run, conf, seed, STEPS, caching) for seed in range(RUNS) for conf in CONFS),
        }
        return counted(mutant, ways, enough)


def counted(mutant: Mutant, ways: dict[str, Iterator[Callable[[], object]]], enough: int) -> dict[str, Any]:
    """Return how many attempts of each way fail, at most ``enough``, and how the first does."""
    found: dict[str, Any] = {"what": mutant.what, "differs": 0, "referee": 0, "twin": 0, "first": ""}
    for way, attempts in ways.items():
        for failure in islice(filter(None, map(_failure, attempts)), enough):
            found[way] += 1
            found["first"] = found["first"] or failure
    return found


def apart(attempt: Callable[[], object]) -> None:
    """Do something in a process of its own: changed C may crash, or never return.

    Raises:
        RuntimeError: it failed.
    """
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=lambda: answers.put(_failure(attempt)))
    process.start()
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        process.join()
    failure = "" if answers.empty() else answers.get()
    if failure or process.exitcode:
        raise RuntimeError(failure or f"ended with {process.exitcode}")


def _failure(attempt: Callable[[], object]) -> str:
    """Return what an attempt raises: a changed rule may well end in a KeyError."""
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 - anything may go wrong
        return f"{type(error).__name__}: {error}"[:120]
    return ""


def main() -> int:
    """Catch every mutant; print a table; the exit code is 1 if one escapes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", type=int, default=800, help="in each situation")
    parser.add_argument("--seed", type=int, default=0, help="of the situations")
    parser.add_argument(
        "--logs", type=Path, help="keep PyTorch's answers in this folder, and reuse those in it"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.operations < 1:
        parser.error("--operations must be at least 1")
    chosen = [
        (conf, options | {"operations": arguments.operations})
        for conf, options in situations(random.Random(arguments.seed))  # noqa: S311 - nothing secret
    ]
    listed, equal = mutants()
    with tempfile.TemporaryDirectory() as folder:
        logs = record(chosen, arguments.logs or Path(folder))
    rows = []
    with progress_line() as show:
        for mutant in listed:
            rows.append(caught(mutant, logs, enough=3))
            show(f"{len(rows)} of {len(listed)} mutants")
    for row in rows:
        row["equal"] = equal.get(row["what"], "")
        row["as it should"] = bool(row["differs"] or row["referee"] or row["twin"]) != bool(row["equal"])
    print(markdown(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"seed": arguments.seed, "rows": rows}, indent=1) + "\n")
    return int(not all(row["as it should"] for row in rows))


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the result as a table."""
    lines = ["| rule changed | differs | referee | twin | first |", "|---|--:|--:|--:|---|"]
    for row in rows:
        first = row["first"] or (f"cannot be told: {row['equal']}" if row["equal"] else "**not caught**")
        cells = (row["what"], row["differs"], row["referee"], row["twin"], first.replace("|", "/"))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    by_one = sum(bool(row["differs"] or row["referee"] or row["twin"]) for row in rows)
    lines += ["", f"{by_one} of {len(rows)} caught; 3 means 3 or more situations."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
