"""Check that every tested version of PyTorch still gives its recorded figures.

    python benchmarks/torch_versions.py                    this environment's PyTorch
    python benchmarks/torch_versions.py 2.8.0 2.11.0       each in a new environment
    python benchmarks/torch_versions.py 2.12.1 --record    add a version's figures to the table

An environment holds PyTorch alone, without NVIDIA's libraries: the ghost stands in for all of them.
The golden figures are in torch_versions.json beside this file; docs/torch-versions.md explains where
versions differ.
"""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).with_suffix(".json")
JOBS = (
    "gpt.py --steps 3",
    "checkpointed.py --steps 3",
    "accumulation.py --steps 3",
    "linear1024.py",
    "two_linear.py",
)

Figures = dict[str, dict[str, int]]
"""Job -> peak allocated and reserved, bytes."""


def main() -> int:
    """Compare or record the figures and print a line for each job; return 1 if a figure differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", help="versions to install (default: test the installed one)")
    parser.add_argument("--record", action="store_true", help="record the figures as golden")
    args = parser.parse_args()
    golden: dict[str, Figures] = json.loads(GOLDEN.read_text())
    wrong = 0
    for version in args.versions or [None]:
        with environment(version) as python:
            name = torch_version(python)
            found = {job: measure(python, job) for job in JOBS}
        if args.record:
            golden[name] = found
            GOLDEN.write_text(json.dumps(golden, indent=2, sort_keys=True) + "\n")
        for job in JOBS:
            expected = golden.get(name, {}).get(job)
            same = found[job] == expected
            wrong += not same
            print(f"{name:14} {job:34} {'equal' if same else f'{expected} expected, found'} {found[job]}")
    return int(wrong > 0)


@contextlib.contextmanager
def environment(version: str | None) -> Iterator[str]:
    """Yield an interpreter with memfit and this version of PyTorch; None stands for the current one."""
    if version is None:
        yield sys.executable
        return
    with tempfile.TemporaryDirectory(prefix="torch-versions-") as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        install = (python, "-m", "pip", "install", "--quiet")
        subprocess.run([*install, "--no-deps", f"torch=={version}"], check=True)
        needs = "import importlib.metadata as m; print(*(m.requires('torch') or ()), sep='\\n')"
        # Triton compiles kernels for the GPU; the rest are NVIDIA's own libraries.
        needed = [line for line in output(python, "-c", needs).splitlines() if needed_here(line)]
        with (REPOSITORY / "pyproject.toml").open("rb") as file:
            ours = tomllib.load(file)["project"]["dependencies"]
        needed += [line for line in ours if not line.startswith("torch")]
        subprocess.run([*install, *needed], check=True)
        subprocess.run([*install, "--no-deps", str(REPOSITORY)], check=True)
        yield python


def needed_here(requirement: str) -> bool:
    """Return whether PyTorch needs a requirement on the ghost, which stands in for NVIDIA's libraries."""
    return "extra ==" not in requirement and not re.match(r"nvidia|cuda|triton", requirement)


def torch_version(python: str) -> str:
    """Return ``torch.__version__`` without importing torch, which may lack NVIDIA's libraries."""
    return output(
        python, "-c", "from memfit.ghost.build.torch_install import find_torch as f; print(f().version)"
    ).strip()


def measure(python: str, job: str) -> dict[str, int]:
    """Run one job on the ghost; return its peaks in bytes."""
    script, *arguments = job.split()
    with tempfile.TemporaryDirectory() as folder:
        answer = f"{folder}/answer.json"
        path = str(REPOSITORY / "examples" / script)
        output(python, "-m", "memfit", "dry-run", "--steps", "1000", "--json", answer, "--", path, *arguments)
        peak = json.loads(Path(answer).read_text())["peak"]
        return {"allocated": peak["allocated"], "reserved": peak["reserved"]}


def output(*command: str) -> str:
    """Run a command and return its standard output; if it fails, exit with all of its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
