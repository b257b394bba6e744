"""Check that the tests of memfit's allocator catch wrong rules: mutate one rule at a time.

    python benchmarks/allocator_mutations.py [--operations 800] [--seed N] [--logs DIR] [--json FILE]

The benchmark records the results of PyTorch's real allocator for random operations, in every situation of
allocator_differential.py. Each mutant repeats the operations and is caught if a result differs (``differs``).
Python mutants also perform random operations under the referee (``referee``); compiled mutants are compared
with the reference in Python (``twin``). Exits with 1 if a mutant escapes that mutants.toml does not list as
equivalent, or if an equivalent one is caught.
"""

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
from measuring import at_least_1, command_line, write_json

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).with_name("allocator")))
from compiled import replay_compiled
from model import Log, Model
from mutants import Mutant, mutants, mutated, mutated_c
from twins import TWIN_CONFS, compare
from watched import CONFS, run

from memfit.report.terminal.progress_line import progress_line

RUNS = 4  # random runs (seeds) per conf
STEPS = 250  # operations per run under the referee
LONGEST = 60  # time limit of one attempt of a compiled mutant, in seconds


def record(chosen: list[tuple[str, Options]], folder: Path) -> list[Log]:
    """Record the real allocator's results; reuse existing logs."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = []
    with progress_line() as show:
        for number, (conf, options) in enumerate(chosen):
            path = folder / f"{number}.npz"
            if not path.exists():
                result = drive(conf, options | {"log": str(path)})
                if result["mismatch"]:
                    raise SystemExit(
                        f"The unchanged allocator already differs under {conf!r}: {result['mismatch']}"
                    )
            logs.append(Log.read(path))
            show(f"{len(logs)} of {len(chosen)} situations recorded")
    return logs


def caught(mutant: Mutant, logs: list[Log], enough: int) -> dict[str, Any]:
    """Return how often each method catches a mutant, up to ``enough`` times, and the first failure."""
    if mutant.compiled:
        with mutated_c(mutant):
            ways: dict[str, Iterator[Callable[[], object]]] = {
                "differs": (partial(in_child, partial(replay_compiled, log)) for log in logs),
                "twin": (
                    partial(in_child, partial(compare, conf, seed))
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
    """Return how many attempts of each method fail, up to ``enough``, and the first failure."""
    found: dict[str, Any] = {"what": mutant.what, "differs": 0, "referee": 0, "twin": 0, "first": ""}
    for way, attempts in ways.items():
        for failure in islice(filter(None, map(_failure, attempts)), enough):
            found[way] += 1
            found["first"] = found["first"] or failure
    return found


def in_child(attempt: Callable[[], object]) -> None:
    """Run an attempt in a child process, because mutated C may crash or never return.

    Raises:
        RuntimeError: the attempt raised an exception, crashed, or exceeded its time limit.
    """
    context = multiprocessing.get_context("fork")
    failures = context.SimpleQueue()
    process = context.Process(target=lambda: failures.put(_failure(attempt)))
    process.start()
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        process.join()
    failure = "" if failures.empty() else failures.get()
    if failure or process.exitcode:
        raise RuntimeError(failure or f"the process ended with exit code {process.exitcode}")


def _failure(attempt: Callable[[], object]) -> str:
    """Return the exception that an attempt raises, as text; empty if it raises none."""
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 - a mutant may raise anything, such as KeyError
        return f"{type(error).__name__}: {error}"[:120]
    return ""


def main() -> int:
    """Try to catch every mutant and print a table; return 1 if a result is not as expected."""
    parser = command_line(__doc__, results=True)
    parser.add_argument(
        "--operations", type=at_least_1, default=800, help="number of operations in each situation"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of the situations")
    parser.add_argument(
        "--logs", type=Path, help="keep the logs of PyTorch's results in this folder and reuse those in it"
    )
    arguments = parser.parse_args()
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
        row["as expected"] = bool(row["differs"] or row["referee"] or row["twin"]) != bool(row["equal"])
    print(markdown(rows))
    write_json(arguments.json, {"seed": arguments.seed, "rows": rows})
    return int(not all(row["as expected"] for row in rows))


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| mutant | differs | referee | twin | first failure |", "|---|--:|--:|--:|---|"]
    for row in rows:
        first = row["first"] or (f"equivalent: {row['equal']}" if row["equal"] else "**not caught**")
        cells = (row["what"], row["differs"], row["referee"], row["twin"], first.replace("|", "/"))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    caught_count = sum(bool(row["differs"] or row["referee"] or row["twin"]) for row in rows)
    lines += ["", f"{caught_count} of {len(rows)} caught; 3 means 3 or more situations."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
