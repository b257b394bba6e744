"""What ``memfit doctor`` finds on this machine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnvironmentCheck:
    """The result of one check."""

    name: str
    """What was checked."""
    serves: bool
    text: str
    """What was found; if the check failed, how to fix it."""
    details: tuple[str, ...] = ()
    """Lines that ``--gaps`` prints."""
