"""What the scripts that run on a card share: rehearsals, their options, and result files."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from memfit import __version__
from memfit.atomic_files import write_output_file
from memfit.card.detect_card import Card
from memfit.devices import find_device
from memfit.errors import UnknownDeviceError

sys.path.append(str(Path(__file__).resolve().parents[1]))
import measuring

HERE = Path(__file__).resolve().parent


class Named(Protocol):
    """A job or a case."""

    @property
    def name(self) -> str:
        """As ``--only`` names it."""


_N = TypeVar("_N", bound=Named)


def command_line(doc: str | None, minutes: float | None = None) -> argparse.ArgumentParser:
    """Return a parser with ``--out`` and ``--rehearse``; of scripts that resume, with their options, too."""
    parser = measuring.command_line(doc)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for what is written")
    parser.add_argument(
        "--rehearse", metavar="GPU", help="let the ghost stand in for this GPU; nothing is measured"
    )
    if minutes is not None:
        parser.add_argument(
            "--minutes", type=float, default=minutes, help="time limit (default: %(default)g)"
        )
        parser.add_argument(
            "--again", action="store_true", help="repeat what the result file already contains"
        )
        parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these")
    return parser


def chosen(listed: Iterable[_N], only: list[str] | None, table: str) -> list[_N]:
    """Return the jobs or cases of ``--only``, or all; exit if one is not listed in a file of this folder."""
    found = [each for each in listed if not only or each.name in only]
    if unknown := set(only or ()) - {each.name for each in found}:
        sys.exit(f"Not found: {', '.join(sorted(unknown))}. The names are listed in {HERE / table}.")
    return found


def rehearse(gpu: str | None) -> None:
    """Replace this process by itself with the ghost loaded; return if that has been done, or is not asked.

    Args:
        gpu: the GPU that the ghost stands in for.
    """
    if not gpu or "MEMFIT_REHEARSAL" in os.environ:
        return
    try:
        find_device(gpu)
    except UnknownDeviceError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    os.environ["MEMFIT_REHEARSAL"] = gpu
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(HERE / "rehearsal"), os.environ.get("PYTHONPATH")))
    )
    os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606 - the same command again


def result_name(card: Card, torch: str) -> str:
    """Return the name of a result file, without an ending: CARD-DRIVER-TORCH.

    Args:
        card: what the scripts run on.
        torch: PyTorch's version.
    """
    machine = "rehearsal-" if card.rehearsal else ""
    return re.sub(r"[^\w.+-]+", "_", f"{machine}{card.name}-{card.driver or card.cuda}-torch{torch}")


def ran_on(card: Card, torch: str) -> dict[str, Any]:
    """Return what each result file says first."""
    return {
        "machine": "rehearsal" if card.rehearsal else "card",
        "card": card.name,
        "driver": card.driver,
        "torch": torch,
        "memfit": __version__,
        "day": datetime.now(UTC).date().isoformat(),
    }


class ResultFile:
    """A JSON file and its Markdown table, with every outcome so far.

    Args:
        folder: where they go.
        name: without an ending.
        rows: the field that holds the outcomes.
        markdown: renders the content.
    """

    def __init__(
        self, folder: Path, name: str, rows: str, markdown: Callable[[Mapping[str, Any]], str]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.json"
        self.content: dict[str, Any] = {}
        self._rows, self._markdown = rows, markdown
        if self.path.exists():
            self.content = msgspec.json.decode(self.path.read_bytes())

    @property
    def done(self) -> dict[str, Any]:
        """The outcomes by name."""
        found: dict[str, Any] = self.content.setdefault(self._rows, {})
        return found

    def is_done(self, name: str) -> bool:
        """Return whether an outcome is complete."""
        return self.done.get(name, {}).get("status") == "done"

    def keep(self) -> None:
        """Write both files."""
        write_output_file(self.path, msgspec.json.format(msgspec.json.encode(self.content)) + b"\n")
        write_output_file(self.path.with_suffix(".md"), self._markdown(self.content).encode())

    def shown(self, names: Iterable[str]) -> int:
        """Print the table; return 1 if one of the names failed or was not run."""
        print(self.path.with_suffix(".md").read_text(encoding="utf-8"))
        print(f"Written: {self.path}")
        return int(any(self.done[name]["status"] in ("failed", "not run") for name in names))
