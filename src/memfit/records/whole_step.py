"""What one training step runs on the GPU, in order: what its time follows from."""

from dataclasses import dataclass, field

from memfit.records.host_times import HostUnits
from memfit.records.step_operations import Operation


@dataclass(frozen=True, slots=True)
class WholeStep:
    """The operations from the end of one training step to the end of the next: the update is among them."""

    operations: tuple[Operation, ...]
    """Each once, without storages: the blocks of a model run the same ones. Of a compiled graph, the kernels
    that Inductor scheduled."""
    order: tuple[int, ...]
    """What ran, in this order: indices into ``operations``."""
    labels: tuple[int, ...]
    """For each of these, what the host was doing: indices into the trace's labels."""
    host: HostUnits = field(default_factory=HostUnits)
    """What the host did meanwhile."""
    tf32: bool = False
    """Whether matrix products of float32 were computed in TF32."""
    compiled: bool = False
    """Whether kernels of graphs that Inductor compiled are among the operations."""
    replays: tuple[tuple[int, int], ...] = ()
    """Places in ``order``, from the first to the end: what one replay of a CUDA graph issued at once."""
    after: tuple[tuple[int, int], ...] = ()
    """Places in ``order``: the first operation begins when the second, on another stream, has ended."""
