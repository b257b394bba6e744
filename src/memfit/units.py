"""Parse and format byte counts; everywhere else in memfit a byte count is an int. And parse durations.

>>> parse_bytes("12GiB")
12884901888
>>> format_gib(12884901888)
'12.00 GiB'
"""

import re
from dataclasses import dataclass
from decimal import Decimal

from memfit.errors import UsageError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_FACTOR = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "m": MIB, "mib": MIB, "g": GIB, "gib": GIB, "t": TIB, "tib": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_LARGEST = 1 << 62  # beyond any machine, and still a signed 64-bit integer after one addition


def parse_bytes(text: str) -> int:
    """Parse a byte count: ``12GiB``, ``1.5 GB``, ``800M`` or a plain number of bytes.

    Args:
        text: a non-negative number and an optional unit. ``KiB MiB GiB TiB`` and the
            one-letter forms count in 1024s; ``KB MB GB TB`` in 1000s. Case is ignored.

    Returns:
        Bytes, rounded down.

    >>> parse_bytes("1.5 GB"), parse_bytes("512")
    (1500000000, 512)
    """
    match = _QUANTITY.fullmatch(text)
    factor = _FACTOR.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{text!r} is not an amount of memory. Write it like 12GiB, 800MiB or 1.5GB.")
    amount = int(Decimal(match[1]) * factor)
    if amount > _LARGEST:
        raise UsageError(f"{text!r} is more memory than any device has. Write an amount like 12GiB.")
    return amount


_SECONDS = {"": 1, "s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}


def parse_seconds(text: str) -> float:
    """Parse a duration: ``2min``, ``90s``, ``1.5h`` or a plain number of seconds.

    >>> parse_seconds("1.5 min"), parse_seconds("20")
    (90.0, 20.0)
    """
    match = _QUANTITY.fullmatch(text)
    factor = _SECONDS.get(match[2].lower()) if match else None
    if match is None or factor is None or not float(match[1]):
        raise UsageError(f"{text!r} is not a duration. Write it like 2min, 90s or 1.5h.")
    return float(match[1]) * factor


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of all figures of a table: its rows can be compared, and its sums checked."""

    name: str
    bytes: int

    def number(self, amount: int, sign: str = "") -> str:
        """Format bytes as a number of this unit with two decimals; ``+`` also signs positive numbers.

        >>> unit_for_table(5 * GIB).number(GIB // 2, "+")
        '+0.50'
        """
        return f"{amount / self.bytes:{sign},.2f}"

    def format(self, amount: int) -> str:
        """Format bytes in this unit with two decimals.

        >>> unit_for_table(5 * MIB).format(MIB)
        '1.00 MiB'
        """
        return f"{self.number(amount)} {self.name}"

    def rounds_to_zero(self, amount: int) -> bool:
        """Return whether ``number`` gives 0.00."""
        return abs(amount) < 0.005 * self.bytes


def unit_for_table(reserved: int) -> Unit:
    """Return the unit of the tables of a run: GiB if it reserves at least one, otherwise MiB."""
    return Unit("GiB", GIB) if reserved >= GIB else Unit("MiB", MIB)


def format_gib(amount: int) -> str:
    """Format bytes in GiB with two decimals, the unit of every summary.

    >>> format_gib(3 * GIB // 2)
    '1.50 GiB'
    """
    return f"{amount / GIB:,.2f} GiB"


def format_bytes(amount: int) -> str:
    """Format bytes in the largest binary unit in which the number is at least one.

    >>> format_bytes(2_097_152), format_bytes(512), format_bytes(-1536)
    ('2.0 MiB', '512 B', '-1.5 KiB')
    """
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(amount) >= unit:
            return f"{amount / unit:,.1f} {name}"
    return f"{amount} B"


_DIGITS = 3


def format_seconds(seconds: float) -> str:
    """Return a duration in the unit that suits it, to three digits.

    >>> [format_seconds(each) for each in (0.31284, 0.0000312, 75.3, 5400.0)]
    ['313 ms', '31.2 us', '75.3 s', '90.0 min']
    """
    scales = ((1e-6, "us", 1e-3), (1e-3, "ms", 1.0), (1.0, "s", 120.0), (60.0, "min", 7200.0))
    scale, unit = next(((each[0], each[1]) for each in scales if seconds < each[2]), (3600.0, "h"))
    digits = max(0, _DIGITS - len(str(int(seconds / scale))))
    return f"{seconds / scale:.{digits}f} {unit}"
