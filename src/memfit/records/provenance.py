"""Where a figure comes from: every figure that memfit shows carries its provenance."""

from dataclasses import dataclass
from enum import StrEnum


class Provenance(StrEnum):
    """Where a figure comes from, most certain first; a total has that of its least certain term."""

    EXACT = "exact"  # from the allocator's own history
    MEASURED = "measured"  # from a real device
    SIMULATED = "simulated"  # an exact replay under other settings
    ASSUMED = "assumed"  # a rule or a table, named where it is used


def worst_provenance(*provenances: Provenance) -> Provenance:
    """Return the provenance of a total: that of its least certain term.

    >>> worst_provenance(Provenance.EXACT, Provenance.MEASURED).value
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
    """A caveat of the figures."""

    provenance: Provenance
    text: str
    where: str = ""
    """``file:line``, or empty; for a line that called a package, ``file:line, in package/file:line``."""
    sizes: bool = False
    """Whether byte counts depend on it: they are at most as certain as the note."""
    workspaces: bool = False
    """With ``sizes``: whether it affects only ``Category.WORKSPACE`` and totals."""
    objects: bool = False
    """With ``sizes``: whether it also affects live objects: parameters and all that follows from them."""
    bound: str = ""
    """With ``sizes``: the operator whose size is set to its upper bound, so that the script may need less;
    otherwise empty."""
    activations: bool = False
    """With ``workspaces``: whether graphs saved some, so that it also affects ``Category.ACTIVATION``."""
