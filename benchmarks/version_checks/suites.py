"""Checks that run memfit's own tests, and count why tests are skipped.

tests       all tests that start no process
ranks       examples of every sharding as one of several ranks: NCCL's backend differs most among versions
strategies  those of them that test strategies
arena       the tests of memfit.arena that start processes: training on the ghost and on the CPU
trainers    the tests of transformers', Accelerate's, Lightning's and MMEngine's loops under a plan
"""

import re
import subprocess
from collections import Counter
from dataclasses import replace

from outcomes import REPOSITORY, Outcome, output

TRAINERS = ("accelerate", "lightning", "mmengine", "transformers")


def tests(python: str) -> Outcome:
    """Run the tests that start no process."""
    return run_tests(python, "not process and not slow and not recorded", "tests")


def strategies(python: str) -> Outcome:
    """Run those of them that test strategies."""
    return run_tests(python, "not process and not slow", "tests/strategies")


def ranks(python: str) -> Outcome:
    """Run examples of every sharding as one of several ranks."""
    return run_tests(python, "process", "tests/test_distributed_examples.py")


def arena(python: str) -> Outcome:
    """Train in the arena."""
    return run_tests(python, "process and not slow", "tests/arenas")


def trainers(python: str) -> Outcome:
    """Train under a plan with each trainer."""
    done = run_tests(python, "process and not slow", "tests/integrations")
    code = f"import importlib.metadata as m; print(*map(m.version, {TRAINERS}))"
    versions = dict(zip(TRAINERS, output(python, "-c", code).split(), strict=True))
    summary = ", ".join([done.summary, *map(" ".join, versions.items())])
    return replace(done, summary=summary, figures={**done.figures, **versions})


def run_tests(python: str, marks: str, path: str) -> Outcome:
    """Run the tests with some marks below a path."""
    options = ("-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", "-m", marks)
    command = (python, "-m", "pytest", *options, path)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    skipped: Counter[str] = Counter()
    for count, reason in re.findall(r"^SKIPPED \[(\d+)\] \S+: (.+)$", done.stdout, re.MULTILINE):
        skipped[reason] += int(count)
    ended = done.stdout.rstrip().rpartition("\n")[2]
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|error|skipped)", ended)}
    passed, failed = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)
    return Outcome(
        f"{passed} passed, {failed} failed, {counts.get('skipped', 0)} skipped",
        {"passed": passed, "skipped": dict(skipped)},
        (done.stdout + done.stderr,) if done.returncode or not passed else (),
        skipped,
    )
