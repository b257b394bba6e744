"""Check memfit with other versions of PyTorch, each in an environment of its own.

    python benchmarks/torch_versions.py                     this environment's PyTorch
    python benchmarks/torch_versions.py 2.10.0 2.15.0       each in build/torch-versions, which is kept
    python benchmarks/torch_versions.py 2.10.0 --plans      some of the checks
    python benchmarks/torch_versions.py 2.16.0 --record     keep its figures; then: make docs

``make test-versions`` runs it for every supported version. The checks are in version_checks/; each prints a
line, and the reasons for which tests were skipped. Exits with 1 if a check fails, or if peaks are not those
of torch_versions.json. docs/torch-versions.md shows the figures, and explains where versions differ.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from measuring import command_line

sys.path.insert(0, str(Path(__file__).with_name("version_checks")))

import plans
import programs
import suites
from environments import environment
from outcomes import FailedError, Outcome, output

GOLDEN = Path(__file__).with_suffix(".json")
CHECKS: dict[str, Callable[[str], Outcome]] = {
    "peaks": programs.peaks,
    "training": programs.training,
    "plans": plans.plans,
    "equality": programs.equality,
    "ranks": suites.ranks,
    "tests": suites.tests,
    "arena": suites.arena,
    "trainers": suites.trainers,
    "strategies": suites.strategies,
}
"""Name -> a check, called with an environment's interpreter. All but the last are made by default: the tests
of strategies are among all tests."""


def main() -> int:
    """Check each version; return 1 if a check fails."""
    parser = command_line(__doc__)
    parser.add_argument("versions", nargs="*", help="versions to install (default: check the installed one)")
    parser.add_argument("--record", action="store_true", help="keep the figures in torch_versions.json")
    for name, check in CHECKS.items():
        parser.add_argument(f"--{name}", action="append_const", dest="only", const=name, help=check.__doc__)
    args = parser.parse_args()
    failed = {}
    for version in args.versions or [""]:
        start = time.monotonic()
        python = environment(version) if version else sys.executable
        name = torch_version(python)
        print(f"{name}  environment  {python}  {minutes(start)}", flush=True)
        checks = args.only or [*CHECKS][:-1]
        failed[name] = [check for check in checks if not passes(name, check, python, record=args.record)]
        print(f"{name}  all together {minutes(start)}", flush=True)
    for name, checks in failed.items():
        print(f"{name}  {'FAILED: ' + ', '.join(checks) if checks else 'passed'}")
    return int(any(failed.values()))


def passes(name: str, check: str, python: str, *, record: bool) -> bool:
    """Make a check, print what it found, and record its figures; return whether it passed.

    Args:
        name: PyTorch's version, as ``torch.__version__``.
        check: a key of ``CHECKS``.
        python: the environment's interpreter.
        record: whether to keep the figures if the check passes.
    """
    start = time.monotonic()
    try:
        done = CHECKS[check](python)
    except FailedError as error:
        done = Outcome("", {}, (str(error),))
    golden = json.loads(GOLDEN.read_text())
    failed = list(done.failed)
    if record and not failed:
        golden.setdefault(name, {})[check] = done.figures
        GOLDEN.write_text(json.dumps(golden, indent=2, sort_keys=True) + "\n")
    elif check == "peaks" and not failed and done.figures != (kept := golden.get(name, {}).get(check)):
        failed.append(f"the recorded peaks are {kept},\nthose found {done.figures}")
    print(f"{name}  {check:11}  {'FAILED  ' if failed else ''}{done.summary}  {minutes(start)}")
    for reason, count in sorted(done.skipped.items()):
        print(f"{'':14}{count} skipped: {reason}")
    print("".join(f"{each}\n" for each in failed), end="", flush=True)
    return not failed


def torch_version(python: str) -> str:
    """Return ``torch.__version__`` without importing torch, which may lack NVIDIA's libraries."""
    find = "from memfit.ghost.build.torch_install import find_torch as f; print(f().version)"
    return output(python, "-c", find).strip()


def minutes(start: float) -> str:
    """Return the time since ``start``, of ``time.monotonic``."""
    return f"({(time.monotonic() - start) / 60:.1f} min)"


if __name__ == "__main__":
    sys.exit(main())
