"""One trace replayed under several allocator settings: what each reserves, calls and costs."""

from dataclasses import dataclass, field, fields

from memfit.records.printable_result import PrintableResult
from memfit.records.provenance import Note
from memfit.records.trace import ScriptLocation, Segment


@dataclass(slots=True)
class DriverCalls:
    """Calls of the CUDA runtime and driver that PyTorch's allocator made."""

    malloc: int = 0
    """cudaMalloc, failed ones too."""
    free: int = 0
    """cudaFree, which waits for the device."""
    map: int = 0
    """Handles created and mapped (cuMemCreate, cuMemMap)."""
    unmap: int = 0
    """Handles unmapped and released."""
    synchronize: int = 0
    """Waits for all streams, or for one before an unmapping."""

    def __sub__(self, earlier: "DriverCalls") -> "DriverCalls":
        return DriverCalls(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class SecondsPerDriverCall:
    """Assumed seconds per call of each kind. They may be wrong by several times: none was measured on a card.

    Source: on a card of 2010, cudaMalloc took at least 50 us (University of Virginia, "Memory Allocation
    Overhead"); PyTorch's Note [Expandable Segments] states that mapping a whole device takes milliseconds.
    """

    malloc: float = 100e-6
    free: float = 100e-6
    map: float = 50e-6
    unmap: float = 50e-6
    synchronize: float = 50e-6

    def seconds(self, calls: DriverCalls) -> float:
        """Return the duration of these calls, without the GPU work that a cudaFree waits for."""
        return (
            self.malloc * calls.malloc
            + self.free * calls.free
            + self.map * calls.map
            + self.unmap * calls.unmap
            + self.synchronize * calls.synchronize
        )


@dataclass(frozen=True, slots=True)
class FailedMalloc:
    """The malloc that ended a replay: out of memory."""

    event: int
    """Index of its event in the trace."""
    requested: int
    """Bytes, as requested."""
    free: int
    """Bytes that the device had left then, whether or not the allocator may use them."""
    where: ScriptLocation | None = None
    """Where the script was; None from the replay alone, which knows only requests."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of replaying a trace; up to the malloc that failed, if one did."""

    failure: FailedMalloc | None
    peak_allocated: int
    """Bytes."""
    peak_reserved: int
    most_taken: int
    """The most bytes of the device in use at once, other processes included. On any device of at least this
    many bytes, up to the size of this one, the replay is the same."""
    calls: DriverCalls
    """Of the CUDA runtime and driver, in total."""
    calls_per_step: DriverCalls | None
    """In the last completed training step; None if fewer than two completed."""
    statistics: dict[str, int]
    """``torch.cuda.memory_stats()`` at the end."""
    segments: tuple[Segment, ...]
    """At the end."""

    @property
    def fits(self) -> bool:
        """Whether every malloc succeeded."""
        return self.failure is None


@dataclass(frozen=True, slots=True)
class AllocatorSetting:
    """Allocator settings to replay a trace under."""

    conf: str = ""
    """``PYTORCH_ALLOC_CONF``."""
    caching: bool = True
    empty_cache_each_step: bool = False
    script: str = field(default="", compare=False)
    """Settings that the script itself makes, whatever the environment says; in the same form."""

    @property
    def name(self) -> str:
        """As a user would write it."""
        if not self.caching:
            return "PYTORCH_NO_CUDA_MEMORY_CACHING=1"
        return self.conf + (" " * bool(self.conf) + "empty_cache() every step") * self.empty_cache_each_step


@dataclass(frozen=True, slots=True)
class SettingOutcome:
    """What a trace needs and costs under one setting."""

    setting: AllocatorSetting
    replay: ReplayResult
    seconds_per_step: float | None
    """Driver calls of a steady step, at assumed rates; None if too few steps completed."""
    memory_fraction: float | None = None
    """Fraction of the device that PyTorch may reserve; None without a limit."""
    smallest: int | None = None
    """Bytes of the smallest device on which the trace fits, as it does on every larger one; None if it was
    not searched for."""
    current: bool = False
    """Whether the trace was made with this setting."""


@dataclass(frozen=True, slots=True, repr=False)
class AllocatorComparison(PrintableResult):
    """One trace under several allocator settings."""

    json_description = "What ``memfit replay --json`` and ``memfit allocator --json`` write."

    outcomes: tuple[SettingOutcome, ...]
    """The first is that of the settings that the trace was made with."""
    recommended: SettingOutcome | None
    """The outcome that reserves less than ``current`` at no cost in a steady step, if there is one."""
    total: int
    """Bytes of the device."""
    taken: int
    """Bytes of it that the context and other processes hold."""
    rates: SecondsPerDriverCall
    """The rates behind ``seconds_per_step``: seconds that one call of each kind takes."""
    notes: tuple[Note, ...]
    provenance: str = "simulated"
    """Of bytes and calls."""
    seconds: str = "assumed"
    """Provenance of the rates."""

    @property
    def current(self) -> SettingOutcome:
        """The outcome of the settings that the trace was made with."""
        return self.outcomes[0]
