"""How long a training step takes, and what takes it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeShare:
    """What a part of the work keeps the GPU busy for."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CommunicationTime:
    """What the collectives of a step take. Seconds."""

    seconds: float
    """Of all, each with nothing else on the card."""
    exposed: float
    """By how much the step would be shorter if they took no time."""
    ranks: int
    """How many ranks take part, at most."""
    basis: str
    """What most of their time rests on."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one training step of a script, and of what it consists. Seconds."""

    seconds: float
    """From the end of one step to the end of the next, in the long run."""
    low: float
    """In nine cases of ten, the real time is between ``low`` and ``high``."""
    high: float
    card: str
    basis: str
    """What the times of most kernels rest on."""
    gpu_seconds: float
    """In which the GPU works: any of its streams computes or copies. Collectives are apart."""
    host_seconds: float
    """That the host needs to issue the work, if it never waits for the GPU."""
    host_basis: str
    """What these rest on."""
    kinds: tuple[TimeShare, ...]
    """Of the GPU's time, by kind of kernel; longest first."""
    modules: tuple[TimeShare, ...]
    """The same by module, backward and recomputation included; empty names are outside of modules."""
    phases: tuple[TimeShare, ...]
    """The same by phase."""
    utilization: float
    """Floating-point operations of products, convolutions and attentions, as a share of what the card's data
    sheet promises for this time."""
    samples: int | None
    """That a step trains on; None if memfit did not find out."""
    tokens: int | None
    """The same of tokens."""
    cpu_seconds: float = 0.0
    """In which the host computes on tensors of its own, such as updates of offloaded shards; assumed."""
    communication: CommunicationTime | None = None
    """None if the step has no collectives, as on one GPU. With several, all figures are of one rank."""

    @property
    def samples_per_second(self) -> float | None:
        """Samples that it trains on in a second; None if that is not known."""
        return None if self.samples is None else self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """The same of tokens."""
        return None if self.tokens is None else self.tokens / self.seconds

    @property
    def is_bound_by_host(self) -> bool:
        """Whether the GPU waits for the host more than a tenth of the time."""
        exposed = self.communication.exposed if self.communication else 0.0
        return self.gpu_seconds + exposed < 0.9 * self.seconds
