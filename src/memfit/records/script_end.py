"""How a run of a script ended, and which stand-ins for GPU values may be the reason."""

from dataclasses import dataclass

CHECK = "a check"
FINITE_CHECK = "a check that values are finite"
"""What was read, of a value that is assumed because checks pass, or only because values are finite."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """A value that the ghost returned for a GPU value, which it does not compute."""

    where: str
    """``file:line`` that read it, with the line of an installed package that this called, or the module."""
    what: str
    """What was read: ``a float``, ``a copy of numbers``, ``the size of nonzero``."""
    value: str
    """What the read returned."""
    instead: str
    """What to pass as ``--values`` for another value (``train.py:9=0``); empty if nothing changes it."""

    @property
    def key(self) -> str:
        """What reads have in common that one option changes: the line or the kind; otherwise the place."""
        return self.instead.rpartition("=")[0] or self.where


@dataclass(frozen=True, slots=True)
class ScriptEnd:
    """How the run of the script ended."""

    reason: str
    """``steps`` (stopped after the steps asked for), ``time`` (stopped after the seconds asked for), ``end``
    (its own end), ``exception``, ``out of memory`` or ``interrupted``."""
    exit_code: int
    exception: str = ""
    """The exception as Python prints it below the traceback; for ``sys.exit(message)``, the message."""
    where: str = ""
    """``file:line`` of the innermost user frame of the exception, or empty."""
    evaluation: str = ""
    """With ``steps``: ``file:line`` of a call of ``eval()`` in the user's code that did not run, or empty."""
    missing_updates: str = ""
    """Which updates a script that trained did not make, as a sentence without a full stop; otherwise empty.
    The figures lack what these updates need."""
    stand_ins: tuple[StandIn, ...] = ()
    """What the script read, newest first: with ``missing_updates``, ``exception`` or an exit code other than
    0, what may be why; otherwise what left out branches that run a model, and with ``end`` what decides
    which turns of its loops it runs."""

    @property
    def stopped(self) -> bool:
        """Whether memfit ended the script, which would have gone on."""
        return self.reason in ("steps", "time")

    @property
    def gave_up(self) -> bool:
        """Whether the script ended on its own with an exit code other than 0."""
        return self.reason == "end" and self.exit_code != 0
