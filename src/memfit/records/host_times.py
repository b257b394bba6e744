"""How long the host takes to issue a training step: Python, PyTorch's dispatcher and autograd, the driver.

    seconds of a step = the sum of counts x seconds of one

The seconds of one are measured on this machine (``run/measure_host_times.py``), in networks rather than in
loops over one operation: there, processors have all code and data of an operation at hand, and a step would
seem half as long as it is. What is not measured is assumed: no GPU is needed, so the driver's work is not
among what is. The host is this machine: on another, measure again.
"""

from dataclasses import astuple, dataclass
from operator import mul

from memfit.records.provenance import Provenance

MEASURED_OF_HOST = (
    *("python_calls", "operations", "autograd_nodes", "gradients", "updated_parameters"),
    *("checkpointed_regions", "checkpointed_tensors", "watched_operations"),
)
"""What networks tell about a machine. The driver's work is not among it. Regions that memfit checkpoints are
assumed to take as much more than PyTorch's as where that was measured, calls in hooks as long as others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUnits:
    """An amount of each thing that takes the host time: how many a step has, or the seconds of one.

    >>> HostUnits(python_calls=1000, operations=100).operations
    100
    """

    python_calls: float = 0
    """Calls of functions written in Python, by the script and by libraries; optimizers' and hooks' apart."""
    hook_calls: float = 0
    """The same in the hooks of FSDP, which run in the forward, the backward and the update."""
    operations: float = 0
    """Operations on the GPU that PyTorch dispatches, of forward, backward and update, views apart."""
    autograd_nodes: float = 0
    """Nodes of autograd's graph: of most operations and views of a forward, recomputed or not."""
    gradients: float = 0
    """Gradients of parameters, accumulated and released."""
    updated_parameters: float = 0
    """Parameters that an optimizer updates, with operations over lists; the operations apart."""
    checkpointed_regions: float = 0
    """Regions that are checkpointed without reentry, by PyTorch's function or by memfit."""
    checkpointed_tensors: float = 0
    """Tensors that autograd saves in such regions, and that go through PyTorch's hooks."""
    replayed_tensors: float = 0
    """The same in regions of memfit's, which also watch buffers and what modules keep."""
    watched_operations: float = 0
    """Operations and views under a dispatch mode in Python: of the forward and the recomputation of regions
    that keep the results of some operations."""
    launches: float = 0
    """Kernels that the driver launches."""
    library_calls: float = 0
    """Calls of cuBLAS and cuDNN, which choose a kernel and launch it."""
    cpu_gigabytes: float = 0
    """10^9 bytes that operations on the CPU read and write, with all of its cores. A step's are in its
    operations, where they run."""


@dataclass(frozen=True, slots=True)
class HostTimes:
    """The seconds that a host takes for one of each thing.

    >>> round(ASSUMED_HOST_TIMES.step_seconds(HostUnits(python_calls=1000, operations=100)), 4)
    0.0026
    """

    one: HostUnits
    source: str
    measured: bool = False
    """Whether this machine measured what can be; everything else is assumed."""

    def step_seconds(self, step: HostUnits) -> float:
        """Return the seconds for a step of so many."""
        return float(sum(map(mul, astuple(step), astuple(self.one))))

    def provenance(self, name: str) -> Provenance:
        """Return whether the seconds of one, of a field of ``one``, were measured or assumed."""
        is_measured = self.measured and name in (*MEASURED_OF_HOST, "cpu_gigabytes")
        return Provenance.MEASURED if is_measured else Provenance.ASSUMED


ASSUMED_HOST_TIMES = HostTimes(
    HostUnits(
        python_calls=1.8e-6,
        hook_calls=1.8e-6,
        operations=8e-6,
        autograd_nodes=7e-6,
        gradients=20e-6,
        updated_parameters=13e-6,
        checkpointed_regions=300e-6,
        checkpointed_tensors=33e-6,
        replayed_tensors=58e-6,
        watched_operations=26e-6,
        launches=2.8e-6,
        library_calls=5.6e-6,
        cpu_gigabytes=20e-3,
    ),
    "10 networks of torchvision, transformers and timm, made small, with torch 2.14.1 and Python 3.11 on two "
    "cores of an Intel Xeon, on the ghost (benchmarks/host_times.py); a launch: the median of 501 beside an "
    "A100 (argonne-lcf/ALCFBeginnersGuide, BabelStream under Nsight Systems); a library call: two "
    "launches; a gigabyte on the CPU: a guess at a server's",
)
