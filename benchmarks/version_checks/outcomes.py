"""What a check of one version of PyTorch found, and how a check runs programs."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a check."""

    summary: str
    figures: Mapping[str, Any]
    """What torch_versions.json keeps."""
    failed: tuple[str, ...] = ()
    """Why the check failed; empty if it did not."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> how many tests were skipped for it."""


class FailedError(Exception):
    """A program exited with an error; the message holds all of its output."""


def output(*command: str, folder: Path | str = REPOSITORY) -> str:
    """Run a command in a folder and return what it prints.

    Raises:
        FailedError: it exits with an error.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise FailedError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def memfit(python: str, folder: str, command: str, *arguments: str) -> Any:
    """Run a command of memfit in a folder, and return its result."""
    output(python, "-m", "memfit", command, "--json", "result.json", *arguments, folder=folder)
    return json.loads((Path(folder) / "result.json").read_text())
