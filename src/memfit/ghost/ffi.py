"""The controls of the loaded ghost runtime, through ctypes."""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from enum import IntEnum

from memfit.errors import GhostError
from memfit.ghost.build.extensions import Extensions
from memfit.ghost.build.runtime_library import Build
from memfit.ghost.cudnn.cache import Configuration
from memfit.ghost.cudnn.client import installed_cudnn
from memfit.ghost.device import GhostDevice
from memfit.ghost.workspaces import Workspaces, WorkspaceSource

_REFUSALS = {
    1: "the device count or the bytes in use are out of range",
    2: "device memory is already allocated; configure it before anything uses CUDA",
    3: "its 48 TiB of addresses could not be reserved; lift the limit on address space (ulimit -v unlimited)",
}


class LogAction(IntEnum):
    """What an entry of the allocation log says happened; ``enum ghost_action``."""

    MALLOC = 0
    FREE = 1
    MALLOC_ASYNC = 2
    FREE_ASYNC = 3
    OUT_OF_MEMORY = 4


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One call of cudaMalloc or its kin."""

    action: LogAction
    device: int
    address: int
    """For ``OUT_OF_MEMORY`` the bytes that were still free, in the pool too where it was asked."""
    size: int
    """Bytes it takes of the device; as requested for ``OUT_OF_MEMORY``."""
    stream: int
    """The stream's handle; 0 for the default stream and for the synchronous calls."""
    label: int
    """What the calling thread had set with ``Ghost.set_label``."""
    time_us: int
    """Microseconds since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class Space:
    """A use of memory that a library worked in."""

    address: int
    size: int
    """Bytes, as the library had asked for them."""
    label: int
    """What the calling thread had set with ``Ghost.set_label``."""


class _Device(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("multiprocessors", ctypes.c_int),
        ("threads_per_multiprocessor", ctypes.c_int),
        ("blocks_per_multiprocessor", ctypes.c_int),
        ("total_bytes", ctypes.c_uint64),
        ("shared_per_block", ctypes.c_uint64),
        ("shared_per_block_optin", ctypes.c_uint64),
        ("shared_per_multiprocessor", ctypes.c_uint64),
        ("l2_bytes", ctypes.c_int),
        ("memory_bus_bits", ctypes.c_int),
        ("clock_khz", ctypes.c_int),
        ("memory_clock_khz", ctypes.c_int),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("action", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("label", ctypes.c_uint64),
        ("time_us", ctypes.c_int64),
    )


class _Space(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("size", ctypes.c_uint64), ("label", ctypes.c_uint64))


class _Configuration(ctypes.Structure):
    _fields_ = (
        ("workspace", ctypes.c_uint64),
        ("engine", ctypes.c_int64),
        ("numerical_notes", ctypes.c_uint32),
        ("behavior_notes", ctypes.c_uint32),
    )


_ANSWERER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_Configuration), ctypes.c_int)


class Ghost:
    """The loaded runtime's controls. One per process: made by ``load``.

    ``extensions`` is what libraries that were loaded since wanted and the runtime does not have.
    """

    def __init__(self, library: ctypes.CDLL, build: Build, extensions: Extensions) -> None:
        self.extensions = extensions
        library.ghost_configure.argtypes = (ctypes.POINTER(_Device), ctypes.c_int, ctypes.c_uint64)
        library.ghost_counter.argtypes = (ctypes.c_char_p,)
        library.ghost_counter.restype = ctypes.c_uint64
        library.ghost_take.argtypes = (ctypes.c_int64,)
        library.ghost_own.argtypes = (ctypes.c_uint64,)
        library.ghost_answer_counts.argtypes = (ctypes.c_uint64,)
        library.ghost_answer_elapsed.argtypes = (ctypes.c_float,)
        library.ghost_gaps_reached.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
        library.ghost_gaps_reached.restype = ctypes.c_size_t
        library.ghost_allocation_log.argtypes = (ctypes.POINTER(_Event), ctypes.c_size_t)
        library.ghost_allocation_log.restype = ctypes.c_size_t
        library.ghost_set_label.argtypes = (ctypes.c_uint64,)
        library.ghost_answer_with.argtypes = (_ANSWERER,)
        library.ghost_spaces.argtypes = (ctypes.POINTER(_Space), ctypes.c_size_t)
        library.ghost_spaces.restype = ctypes.c_size_t
        self._library = library
        self._thread = threading.local()
        self._build = build
        self.workspaces = Workspaces.read()

    def configure(
        self,
        device: GhostDevice,
        *,
        count: int = 1,
        in_use: int = 0,
        own: int = 0,
        workspaces: WorkspaceSource = WorkspaceSource.CUDNN,
    ) -> None:
        """Choose the device, before CUDA is initialised; in a forked child too.

        Args:
            device: what to stand in for.
            count: how many of them.
            in_use: bytes of each that are gone from the start: the CUDA context, other processes.
            own: of those, the bytes of this process's context.
            workspaces: who says what libraries work in.

        Raises:
            GhostError: it refused, and why.

        """
        name, *figures = astuple(device)
        refusal = self._library.ghost_configure(_Device(name.encode()[:255], *figures), count, in_use)
        if refusal:
            raise GhostError(
                f"Cannot configure the ghost as {device.name}: {_REFUSALS.get(refusal, refusal)}."
            )
        self._library.ghost_own(own)
        self.workspaces = Workspaces.read(workspaces, lambda: installed_cudnn(device, self._build))
        self.answer_with(self.workspaces.answer)

    def counter(self, name: str) -> int:
        """Return a count since loading, or bytes of the current device.

        Args:
            name: "used", "used_peak", "capacity" (bytes); "mallocs", "frees", "maps", "launches",
                "copies", "library_calls", "cudnn_calls". Any other is 0.

        """
        return int(self._library.ghost_counter(name.encode()))

    def take(self, size: int) -> None:
        """Let another process on the card take bytes of the current device, or give them back if negative."""
        self._library.ghost_take(size)

    def hold_events(self, hold: bool) -> None:
        """Keep events that are recorded from now on "not ready" until something synchronises, or let go."""
        self._library.ghost_hold_events(int(hold))

    @contextmanager
    def answering_counts(self, count: int) -> Iterator[None]:
        """Answer this thread's device-to-host copies of at most 8 bytes with a count; the innermost wins."""
        outer: int | None = getattr(self._thread, "count", None)
        self._thread.count = count
        self._library.ghost_answer_counts(count)
        try:
            yield
        finally:
            self._thread.count = outer
            if outer is None:
                self._library.ghost_answer_nothing()
            else:
                self._library.ghost_answer_counts(outer)

    @contextmanager
    def answering_elapsed(self, milliseconds: float) -> Iterator[None]:
        """Answer this thread's questions for the time between two events with one duration."""
        self._library.ghost_answer_elapsed(milliseconds)
        try:
            yield
        finally:
            self._library.ghost_answer_elapsed(0)

    def last_read_known(self) -> bool:
        """Return whether this thread's last device-to-host copy was answered from remembered bytes."""
        return bool(self._library.ghost_last_read_known())

    def gaps_reached(self) -> tuple[str, ...]:
        """Return the gaps and assumed answers the run has reached, in order of first use.

        Those of extensions (``Extensions.wanted_by``) are among them.
        """
        needed = self._library.ghost_gaps_reached(None, 0)
        text = ctypes.create_string_buffer(needed)
        self._library.ghost_gaps_reached(text, needed)
        return tuple(text.value.decode().split("\n")[:-1])

    def log_allocations(self, on: bool) -> None:
        """Start the allocation log afresh, or end it."""
        self._library.ghost_log_allocations(int(on))

    def set_label(self, label: int) -> None:
        """Tag this thread's next entries of the allocation log."""
        self._library.ghost_set_label(label)

    def answer_with(self, answer: Callable[[bytes], Sequence[Configuration]]) -> None:
        """Let a function say what a library would choose, and how many bytes that works in.

        Args:
            answer: takes a question as ``memfit.ghost.workspaces`` reads it, and returns the ways to do
                it in order of preference. It is called on whichever thread asks, and must not raise.
        """

        def write(question: bytes, out: "ctypes._Pointer[_Configuration]", room: int) -> int:
            offers = answer(question)[:room]
            for i, offer in enumerate(offers):
                out[i] = _Configuration(
                    offer.workspace, offer.engine, offer.numerical_notes, offer.behavior_notes
                )
            return len(offers)

        self._answerer = _ANSWERER(write)  # kept: the runtime holds its address alone
        self._library.ghost_answer_with(self._answerer)

    def spaces(self) -> list[Space]:
        """Return every use of memory that libraries worked in, in order, repetitions left out."""
        length = self._library.ghost_spaces(None, 0)
        spaces = (_Space * length)()
        length = min(length, self._library.ghost_spaces(spaces, length))
        return [Space(space.address, space.size, space.label) for space in spaces[:length]]

    def allocation_log(self) -> list[LogEvent]:
        """Return every cudaMalloc, cudaFree and their stream-ordered kin since the log was started.

        For allocators whose history PyTorch does not keep: ``backend:cudaMallocAsync`` and
        ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``.
        """
        length = self._library.ghost_allocation_log(None, 0)
        events = (_Event * length)()
        length = min(length, self._library.ghost_allocation_log(events, length))
        return [
            LogEvent(LogAction(e.action), e.device, e.address, e.size, e.stream, e.label, e.time_us)
            for e in events[:length]
        ]
