"""Compare the ghost of today with what operators.py measured on a card earlier. No GPU is needed.

    python benchmarks/gpu/operators_today.py "larger fft" "larger linalg" "larger LSTM"
    python benchmarks/gpu/operators_today.py             every larger call; a few minutes

The tables in results/ have the operators whose requests differed between a card and the ghost of that day.
This script runs those whose names start so on the ghost again, and prints the peak of requested bytes: the
card's, and how far off the ghost was then and is now. Operators that were equal are not in the tables.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from measuring import command_line, table

HERE = Path(__file__).resolve().parent
HEADINGS = ("operator", "requested peak, bytes", "ghost then", "today")
_PROFILE = re.compile(r"the ghost simulates a (\S+?)\.")
_ROW = re.compile(r"\| (?P<name>larger .*?) \| .*? \| .*? \| .*? \| (?P<peak>.*?) \|")


@dataclass(frozen=True)
class Measured:
    """The peak of an operator's requested bytes, once measured."""

    name: str
    card: int
    ghost: int


def read_table(text: str) -> tuple[str, list[Measured]]:
    """Return the profile of a results file and its rows; a cell with one figure stands for both sides."""
    profile = _PROFILE.search(text)
    if profile is None:
        raise ValueError("not a table of operators.py")
    rows = []
    for row in _ROW.finditer(text):
        card, *ghost = (int(figure.replace(",", "")) for figure in row["peak"].split(" / "))
        rows.append(Measured(row["name"], card, *(ghost or [card])))
    return profile[1], rows


def peaks_today(profile: str, names: Sequence[str]) -> dict[str, int]:
    """Return the peaks of requested bytes on the ghost, by operator."""
    with tempfile.TemporaryDirectory(prefix="memfit-operators-") as folder:
        command = (str(HERE / "operators.py"), "--rehearse", profile, "--out", folder, "--only", *names)
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        (result,) = Path(folder).glob("*.json")
        found = json.loads(result.read_text(encoding="utf-8"))["ghost"]
    return {name: one["samples"][0]["requested_peak"] for name, one in found.items() if one.get("samples")}


def compared(rows: Sequence[Measured], today: dict[str, int]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    for row in sorted(rows, key=lambda row: row.name):
        now = today.get(row.name)
        after = "failed" if now is None else f"{now - row.card:+,}"
        yield row.name, f"{row.card:,}", f"{row.ghost - row.card:+,}", after


def main() -> int:
    """Print a table per card; return 1 if an operator failed."""
    parser = command_line(__doc__)
    parser.add_argument("starts", nargs="*", default=["larger"], help="beginnings of operators' names")
    starts = tuple(parser.parse_args().starts)
    failed = False
    for path in sorted((HERE / "results").glob("*-operators.md")):
        profile, measured = read_table(path.read_text(encoding="utf-8"))
        rows = [row for row in measured if row.name.startswith(starts)]
        today = peaks_today(profile, [row.name for row in rows]) if rows else {}
        print(f"**{path.stem.removesuffix('-operators')}**:\n")
        print(table(HEADINGS, "lrrr", compared(rows, today)))
        failed |= any(row.name not in today for row in rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
