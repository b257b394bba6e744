"""The options of a run as one record: the CLI and ``memfit.api`` fill it in, and the child reads it."""

from dataclasses import dataclass

from memfit.devices import DEFAULT
from memfit.run.job_rank import ALONE, Rank

BATCHES = 3
"""Batches of each pass over a loader in a dry run of a whole run."""
SECONDS = 120.0
"""After which such a run is ended."""
SCAN = 60.0
"""For which the batches of a loader are looked through in a run with the longest batch."""
STEPS = 3
"""Training steps of a run by default: the first creates the optimizer's state, the second shows the peak with
that state, the third shows whether memory still grows."""
LONGEST_STEPS = 4
"""The same with the longest batch: the third and the fourth have smaller batches, which shows how the peak
follows the size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run a script. A recording on a GPU uses the first four; a dry run on the ghost uses all."""

    module: bool = False
    """The command names a module, as after ``python -m``, not a file."""
    steps: int | None = STEPS
    """Training steps after which memfit ends the script; None lets the script run to its end."""
    batches: int | None = None
    """End each pass over a ``DataLoader`` after so many batches; None for its own."""
    seconds: float | None = None
    """End the script after this time, where it next asks for a batch or calls a model; None for no limit."""
    scan: float | None = None
    """Look through the batches of each loader for so many seconds, and give the script the largest first;
    None for the loader's own order."""
    labels: bool = True
    """Record modules and phases. The byte counts are the same either way."""
    stdout_to_stderr: bool = False
    """Send the script's standard output to standard error: memfit's own result goes to standard output."""

    preload: tuple[str, str] | None = None
    """A module and an argument: ``install(argument)`` of the module is called before the script runs."""

    gpu: str = DEFAULT
    """Name of a device in the table (``memfit gpus``), or of a MIG slice of one."""
    memory: int | None = None
    """Bytes of device memory; None for the memory of ``gpu``."""
    unlimited: bool = False
    """Let the script allocate without a limit. PyTorch still reports ``memory`` to it: the script may choose
    sizes by that."""
    allocator: str = ""
    """``PYTORCH_ALLOC_CONF`` of the script's process; empty for the one of memfit's own process."""
    rank: Rank = ALONE
    """The rank that the script's process stands for, and of how many."""
    real_ranks: bool = False
    """The other ranks exist, each on a ghost of its own: torchrun, or the script, has started them."""
    objects: str = ""
    """Folder in which the ranks of a job leave the objects that they send each other; empty for one of the
    run's own."""
    finish_late: bool = False
    """Have GPU work of a stream finish only when the host waits for it, or at the end of the step."""
    in_use: int = 0
    """Bytes of device memory that other processes hold."""
    values: str = ""
    """What the ghost returns when the script reads a GPU value, as ``ValueOptions.parse`` reads it."""
    host_memory: bool = True
    """Skip the filling of large CPU tensors, so that their pages take no host memory."""
    weights: bool = True
    """Load the checkpoints that transformers' ``from_pretrained`` requests. Those missing from this machine,
    and with False all of them, are created from their configuration."""
    workspaces: str = "cudnn"
    """Where the sizes of cuDNN's workspaces come from, a ``WorkspaceSource``: ``cudnn`` (the installed cuDNN,
    or the rules where it cannot answer), ``rules``, or ``none`` (0 bytes)."""
