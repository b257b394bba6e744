"""Where a figure comes from: every figure that memfit shows carries its provenance."""

from dataclasses import dataclass
from enum import StrEnum


class Provenance(StrEnum):
    """Where a figure comes from. Ordered from the surest; a total shows the worst of its terms."""

    EXACT = "exact"  # from the allocator's own history
    MEASURED = "measured"  # from a real device
    SIMULATED = "simulated"  # an exact replay under other settings
    ASSUMED = "assumed"  # a rule or a table, named where it is used


def worst(*provenances: Provenance) -> Provenance:
    """Return the provenance of a total: that of its least sure term.

    >>> worst(Provenance.EXACT, Provenance.MEASURED).value
    'measured'
    """
    return max(provenances, key=list(Provenance).index)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of bytes and where it comes from."""

    bytes: int
    provenance: Provenance
    source: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """Something the reader of a figure must know."""

    provenance: Provenance
    text: str
    where: str = ""
    """``file:line``, or empty."""
    sizes: bool = False
    """Whether bytes depend on it: figures that it touches are no surer than it is."""
    workspaces: bool = False
    """Of those, whether it touches ``Category.WORKSPACE`` and totals alone."""
    objects: bool = False
    """Of those, whether it touches what live objects hold, too: parameters and all that follows them."""
    activations: bool = False
    """Of ``workspaces``, whether graphs saved some: it touches ``Category.ACTIVATION``, too."""
