"""``--price``: what an hour of GPUs costs, as options say it, or a table in a file with its date."""

import json
import re
import tomllib
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

from memfit.devices import find_device
from memfit.errors import FileFormatError, UsageError
from memfit.input_files import read_input_file

_SUFFIXES = (".toml", ".json")
_MAX_FILE = 1 << 20
"""Bytes of a table."""
_DAY = "date of its prices under [prices], such as date = 2026-11-30"


def read_prices(given: Iterable[str]) -> tuple[dict[str, float], str]:
    """Return what an hour of each GPU costs, and the date of the oldest table among them.

    Args:
        given: ``RTX-4090=0.40`` each, or a file (.toml, .json). Of several prices of a GPU, the last counts.

    Returns:
        The prices by the names of the devices, and the date as ISO 8601 writes it, empty without a table.

    Raises:
        UsageError: one is neither a price nor a file, or of no GPU of the table (``memfit gpus``).
        FileFormatError: a file cannot be read, or is no table of prices; the message names the line.

    >>> read_prices(["T4=0.35", "RTX-4090=0.40/h"])
    ({'T4': 0.35, 'RTX 4090': 0.4}, '')
    """
    prices: dict[str, float] = {}
    days = []
    for text in given:
        if text.endswith(_SUFFIXES):
            table, day = _read_table(Path(text))
            prices |= table
            days.append(day)
        else:
            name, price = _price(text)
            prices[find_device(name).name] = price
    return prices, min(days, default="")


def _price(text: str) -> tuple[str, float]:
    """Return a GPU and what an hour of it costs: ``RTX-4090=0.40`` or ``RTX-4090=0.40/h``."""
    name, _, amount = text.rpartition("=")
    try:
        price = float(amount.removesuffix("/h"))
    except ValueError:
        price = -1.0
    if not name or not 0 <= price < float("inf"):
        raise UsageError(
            "--price takes a GPU and what an hour of it costs, such as RTX-4090=0.40, or a table of prices "
            f"(.toml or .json), not {text}."
        )
    return name, price


def _read_table(path: Path) -> tuple[dict[str, float], str]:
    """Return the prices in a file, and their date."""
    content = read_input_file(path, _MAX_FILE)
    try:
        text = content.decode()
        found: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = path.suffix[1:].upper()
        raise FileFormatError(f"Cannot read prices from {path}: it is not valid {kind} ({error}).") from None
    table = found.get("prices") if isinstance(found, dict) else None
    if not isinstance(table, dict) or "date" not in table:
        raise FileFormatError(f"Cannot read prices from {path}: it has no {_DAY}.")
    prices: dict[str, float] = {}
    day = ""
    for key, value in table.items():
        try:
            if key == "date":
                day = _day(value)
            else:
                _add(prices, key, value)
        except UsageError as error:
            line = _line_of(key, text)
            where = f"{path}{f', line {line}' * bool(line)}"
            raise FileFormatError(f"Cannot read prices from {where}: {error}") from None
    return prices, day


def _add(prices: dict[str, float], key: str, value: Any) -> None:
    name = find_device(key).name
    if name in prices:
        raise UsageError(f"{key} is {name}, which has a price already. Remove one of the two.")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise UsageError(
            f"{value!r} is no price of {key}. Write what an hour costs as a number, such as 0.40."
        )
    prices[name] = float(value)


def _day(value: Any) -> str:
    try:
        return date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise UsageError(f"{value} is no date. Write the {_DAY}.") from None


def _line_of(key: str, text: str) -> int:
    """Return the number of the first line that assigns a key; 0 if none does.

    >>> _line_of("T4", '{"prices": {"T4": 0.35}}')
    1
    """
    assigned = re.compile(rf"""(^|[\s,{{])(["']?){re.escape(key)}\2\s*[=:]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if assigned.search(line)), 0)
