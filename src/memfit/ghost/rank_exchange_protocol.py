"""What carries small tensors between the ranks of a job."""

from collections.abc import Callable
from typing import Any, Protocol


class RankExchange(Protocol):
    """Through files if the other ranks run only when they are needed; else through the job's store."""

    real: bool
    """Whether the other ranks exist in any case. Then PyTorch's Gloo carries what is on the CPU."""

    sources: set[int]
    """The ranks whose tensors, objects or files this one has received."""
    missing: str
    """What the script reads that no rank has written; empty if there is nothing."""

    def key(self, *call: object) -> str:
        """Return the key of what the next such call sends, the same on each rank; empty to send nothing."""

    def leave(self, key: str, sent: Any) -> None:
        """Leave something for other ranks."""

    def leave_awaited(self, key: str, sent: Callable[[], Any]) -> None:
        """Do so with what a function returns, which may have to wait for another rank."""

    def receive(self, key: str, sender: int) -> Any:
        """Return what another rank has left.

        Raises:
            LookupError: it cannot be had; the message says why.
        """

    def refuse(self, why: str) -> object:
        """End the run: the script needs what cannot be had."""


def what_others_sent(ranks: RankExchange | None, *, real: bool) -> str:
    """Return where what the other ranks send came from; ``real``: they exist."""
    if real:
        return "The ranks sent each other buffers of up to 64 KiB; what longer ones hold is unknown."
    assumed = "memfit assumed that the other ranks send what this one sends."
    if ranks is None or not ranks.sources:
        return assumed
    named = f"rank{'s' * (len(ranks.sources) > 1)} {', '.join(map(str, sorted(ranks.sources)))}"
    return f"{assumed} What the script read that {named} sent or wrote is theirs: memfit ran as {named}, too."
