"""What each allocation of a run is for, as columns."""

from __future__ import annotations  # numpy is named here and not imported: a script may yet set its threads

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Attribution:
    """What each of ``m`` allocations is for, in the order of allocation. Columns are ``m`` long."""

    born: npt.NDArray[np.int64]
    """Index of the event that made the allocation."""
    freed: npt.NDArray[np.int64]
    """Index of the event that freed it; the number of events if none did."""
    requested: npt.NDArray[np.int64]
    """Bytes, as requested."""
    block: npt.NDArray[np.int64]
    """Bytes of its block: rounded, with an unsplit remainder."""
    category: npt.NDArray[np.uint8]
    phase_of_event: npt.NDArray[np.uint8]
    """Index into ``tuple(Phase)``, of each event of the trace."""
    module: npt.NDArray[np.int32]
    """Index into ``modules``, as ``op`` into ``ops`` and ``line`` into ``lines``."""
    op: npt.NDArray[np.int32]
    line: npt.NDArray[np.int32]
    tensor: npt.NDArray[np.int32]
    """Index into ``Trace.tensors``: the tensor that held the allocation; -1 where it is unknown."""
    modules: tuple[str, ...]
    """Module paths; empty outside modules."""
    ops: tuple[str, ...]
    lines: tuple[str, ...]
    """``file:line``; empty where Python had no frame."""

    @property
    def phase(self) -> npt.NDArray[np.uint8]:
        """Index into ``tuple(Phase)``: the phase in which each allocation was made."""
        return self.phase_of_event[self.born]

    def alive(self, event: int) -> npt.NDArray[np.int64]:
        """Return the positions of the allocations that are alive just after an event."""
        return ((self.born <= event) & (self.freed > event)).nonzero()[0]
