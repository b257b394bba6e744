"""Which rank of how many a process stands for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memfit.errors import UsageError
from memfit.records import JobRank

LOCAL_RANK_ARGUMENT = "--local_rank=$LOCAL_RANK"
"""The argument that DeepSpeed's launcher adds for the script, until the rank is known."""
_MOST_GPUS = 16
"""``MAX_DEVICES`` of the ghost (ghost/runtime/core/ghost.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank of ``nproc`` on each of ``nnodes`` machines, counted as torchrun counts them.

    Raises:
        UsageError: a number is too small, or there is no such rank.
    """

    rank: int = 0
    nproc: int = 1
    """Processes, and GPUs, on each machine."""
    nnodes: int = 1
    """Machines."""
    own_gpu_only: bool = False
    """Whether the process sees its own GPU alone, as GPU 0: for a script that does not read LOCAL_RANK."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.nproc > _MOST_GPUS:
            raise UsageError(
                f"--nproc {self.nproc}: the ghost has at most {_MOST_GPUS} GPUs in a machine. For more "
                "ranks, add machines: --nproc 8 --nnodes 128 are 1,024."
            )
        for name in ("nproc", "nnodes"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} must be at least 1, not {getattr(self, name)}.")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"--rank {self.rank}: there is no such rank. {self.nnodes} x {self.nproc} processes have the "
                f"ranks 0 to {self.world_size - 1}."
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nproc * self.nnodes

    @property
    def local(self) -> int:
        """The rank on its machine, and the index of its GPU there."""
        return self.rank % self.nproc

    @property
    def device(self) -> int:
        """The index of its GPU, as the process counts them."""
        return 0 if self.own_gpu_only else self.local

    @property
    def devices(self) -> int:
        """Number of GPUs that the process sees."""
        return 1 if self.own_gpu_only else self.nproc

    @property
    def first_of_machines(self) -> tuple[int, int]:
        """The first rank of its machine, and the first of all: as a rule, they write files for the others."""
        return self.rank - self.local, 0

    def __str__(self) -> str:
        """Name the rank.

        >>> print(Rank(rank=9, nproc=8, nnodes=2))
        rank 9 of 16 (GPU 1 of machine 1)
        """
        where = f" (GPU {self.local} of machine {self.rank // self.nproc})" if self.nnodes > 1 else ""
        return f"rank {self.rank} of {self.world_size}{where}"

    def arguments(self, command: Iterable[str]) -> tuple[str, ...]:
        """Return a script's ``sys.argv`` as this rank gets it.

        >>> Rank(rank=3, nproc=4).arguments(["train.py", "--local_rank=$LOCAL_RANK"])
        ('train.py', '--local_rank=3')
        """
        own = LOCAL_RANK_ARGUMENT.replace("$LOCAL_RANK", str(self.local))
        return tuple(own if each == LOCAL_RANK_ARGUMENT else each for each in command)

    def variables(self, port: int) -> dict[str, str]:
        """Return the environment variables that torchrun sets for this rank.

        >>> sorted(Rank(rank=9, nproc=8, nnodes=2).variables(29500).items())[:3]
        [('GROUP_RANK', '1'), ('GROUP_WORLD_SIZE', '2'), ('LOCAL_RANK', '1')]
        """
        variables = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local,
            "GROUP_RANK": self.rank // self.nproc,
            "ROLE_RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.nproc,
            "GROUP_WORLD_SIZE": self.nnodes,
            "ROLE_WORLD_SIZE": self.world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        return {name: str(value) for name, value in variables.items()}


def first_rank_to_run(*, rank: int, nproc: int, nnodes: int, all_ranks: bool) -> Rank:
    """Return the rank that a dry run of one rank, or of all, begins with."""
    if all_ranks and rank:
        raise UsageError("--rank is one rank, and --all-ranks is all of them: give one of the two.")
    return Rank(rank=rank, nproc=nproc, nnodes=nnodes)


ALONE = Rank()
"""The only rank of a script that runs on one GPU."""


def rank_script_ran_as(job: Rank, environment: Mapping[str, str]) -> JobRank | None:
    """Return the rank that a script ran as: the one to run or, in a recording, that of torchrun's variables.

    >>> rank_script_ran_as(Rank(), {"RANK": "3", "WORLD_SIZE": "8"})
    JobRank(rank=3, world_size=8, nproc=None)
    """
    if job.world_size > 1:
        return JobRank(job.rank, job.world_size, job.nproc)
    rank, size = (environment.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if not (rank.isdigit() and size.isdigit() and int(rank) < int(size)) or int(size) == 1:
        return None
    return JobRank(int(rank), int(size))
