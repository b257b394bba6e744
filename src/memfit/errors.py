"""The exceptions that memfit raises deliberately.

    MemfitError                    exit code
     ├─ UsageError                     2      the command, an option or a name is invalid
     │   ├─ UnknownDeviceError         2      no such GPU in the table; suggests similar names
     │   └─ AmbiguousBatchError        2      a batch may hold as many samples as columns; asks for functions
     ├─ FileFormatError                2      a trace or snapshot cannot be read or is not trustworthy
     ├─ OutputError                    3      a result could not be written: the disk is full
     ├─ TornUpdateError                3      out of memory inside an optimizer's step
     ├─ RankFailedError                3      another rank of a training run failed
     └─ TargetError                    3      the script could not be run
         ├─ DivergenceError            3      a recomputation differs from the forward
         ├─ NotSentError               3      a live object cannot be copied to the ghost's process
         ├─ UnsuitableEnvironmentError 3      torch, the compiler or the platform is unsuitable
         └─ GhostError                 3      the ghost could not be built, loaded or reached

A message says what failed, where, and what to do about it.
"""


class MemfitError(Exception):
    """The base class of memfit's exceptions; ``exit_code`` is the exit code of the command line."""

    exit_code = 3


class UsageError(MemfitError, ValueError):
    """The command, an option or a name is invalid; nothing was run."""

    exit_code = 2


class UnknownDeviceError(UsageError):
    """No GPU of that name is in the table; the message suggests similar names."""


class AmbiguousBatchError(UsageError):
    """A batch of a training run may have another number of samples, or be divided otherwise."""


class FileFormatError(MemfitError, ValueError):
    """A trace or snapshot file is unreadable, in another format, damaged or not plain data."""

    exit_code = 2


class OutputError(MemfitError):
    """A result cannot be written to its file or to standard output; the message names it and the cause."""


class TornUpdateError(MemfitError):
    """An optimizer's step was interrupted: some parameters may be updated, and others not."""


class RankFailedError(MemfitError):
    """Another rank of a training run failed or is gone; the message names it, its phase and its line."""


class TargetError(MemfitError):
    """The user's script could not be run to a result."""


class DivergenceError(TargetError):
    """A recomputation by checkpointing differs from the forward; the message names the operation."""


class NotSentError(TargetError):
    """An object referenced by a live model cannot be copied to the ghost's process; the message names it."""


class UnsuitableEnvironmentError(TargetError):
    """The platform, torch or the compiler cannot run the ghost; the message gives the cause and a remedy."""


class GhostError(TargetError):
    """The ghost runtime could not be built, loaded or configured."""
