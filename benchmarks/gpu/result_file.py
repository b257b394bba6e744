"""The result files of the scripts that run on a card: CARD-DRIVER-TORCH.json and .md."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from memfit.atomic_files import write_bytes
from memfit.card.find import Card


def result_name(card: Card, torch: str) -> str:
    """Return the name of a result file, without an ending.

    Args:
        card: what the scripts run on.
        torch: PyTorch's version.
    """
    machine = "rehearsal-" if card.rehearsal else ""
    return re.sub(r"[^\w.+-]+", "_", f"{machine}{card.name}-{card.driver or card.cuda}-torch{torch}")


class ResultFile:
    """A result file, with every outcome so far.

    Args:
        folder: where it goes.
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

    def keep(self) -> None:
        """Write the JSON file and its Markdown table."""
        write_bytes(self.path, msgspec.json.format(msgspec.json.encode(self.content)) + b"\n")
        write_bytes(self.path.with_suffix(".md"), self._markdown(self.content).encode())
