"""Every exception memfit raises on purpose.

    MemfitError                    exit code
     ├─ UsageError                     2      the command, an option or a name was wrong
     │   └─ UnknownDeviceError         2      no such GPU in the table; names the nearest
     ├─ FileFormatError                2      a trace or snapshot could not be trusted or read
     ├─ TornUpdateError                3      memory ran out inside an optimizer's step
     └─ TargetError                    3      the script could not be run
         ├─ DivergenceError            3      a recomputation did not do what the forward did
         ├─ NotSentError               3      a live object cannot be copied to the ghost's process
         ├─ UnsuitableEnvironmentError 3      torch, the compiler or the platform does not serve
         └─ GhostError                 3      the ghost could not be built, loaded or reached

A message says what failed, where, and what to do about it.
"""

INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended."""


class MemfitError(Exception):
    """The root of memfit's own exceptions; ``exit_code`` is what the command line ends with."""

    exit_code = 3


class UsageError(MemfitError, ValueError):
    """The command, an option or a name was wrong; nothing was run."""

    exit_code = 2


class UnknownDeviceError(UsageError):
    """No GPU of that name is in the table; the message names the nearest."""


class FileFormatError(MemfitError, ValueError):
    """A trace or snapshot file is unreadable, foreign, damaged or not plain data."""

    exit_code = 2


class TornUpdateError(MemfitError):
    """An optimizer's step was interrupted: some parameters may be updated, and others not."""


class TargetError(MemfitError):
    """The user's script could not be run to a result."""


class DivergenceError(TargetError):
    """What checkpointing computed again is not what was computed; the message names the operation."""


class NotSentError(TargetError):
    """Something that hangs on a live model cannot be copied to the ghost's process; the message names it."""


class UnsuitableEnvironmentError(TargetError):
    """The platform, torch or the compiler cannot run the ghost; the message says which, and what would."""


class GhostError(TargetError):
    """The ghost runtime could not be built, loaded or configured."""
