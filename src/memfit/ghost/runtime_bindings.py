"""The controls of the loaded ghost runtime, through ctypes."""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from enum import IntEnum
from typing import TypeVar

from memfit.errors import GhostError
from memfit.ghost.build.extension_stubs import ExtensionStubs
from memfit.ghost.build.runtime_library import BuiltGhost
from memfit.ghost.cudnn.cache import EngineConfig
from memfit.ghost.cudnn.client import installed_cudnn_client
from memfit.ghost.ghost_device import GhostDevice
from memfit.ghost.rank_message_callbacks import (
    EXCHANGE_CALLBACK,
    MESSAGE_CALLBACK,
    Exchange,
    Receive,
    Send,
    rank_exchange_callback,
    rank_receive_callback,
    rank_send_callback,
)
from memfit.ghost.workspaces import WorkspaceSizes, WorkspaceSource

_HOLD_UNTIL_AWAITED = 2  # core/ghost.h
_CONFIGURE_ERRORS = {
    1: "the device count or the bytes in use are out of range",
    2: "device memory is already allocated; configure the ghost before the first use of CUDA",
    3: "its 48 TiB of virtual addresses could not be reserved; lift the limit on address space "
    "(ulimit -v unlimited)",
}
"""Status of ``ghost_configure`` -> the reason."""


_Entry = TypeVar("_Entry", bound=ctypes.Structure)


class AllocationLogAction(IntEnum):
    """The kind of an allocation log entry; ``enum ghost_action``."""

    MALLOC = 0
    FREE = 1
    MALLOC_ASYNC = 2
    FREE_ASYNC = 3
    OUT_OF_MEMORY = 4


class AllocationLogEvent(ctypes.Structure):
    """One call of cudaMalloc, cudaFree or their stream-ordered variants; ``struct ghost_event``."""

    _fields_ = (
        ("action", ctypes.c_int32),  # a LogAction
        ("device", ctypes.c_int32),
        # For OUT_OF_MEMORY, the bytes still free, including those of the pool for a pool allocation.
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint64),  # bytes taken from the device; for OUT_OF_MEMORY, the bytes requested
        ("stream", ctypes.c_uint64),  # its handle; 0 for the default stream and for the synchronous calls
        ("label", ctypes.c_uint64),  # what the calling thread had set with Ghost.set_label
        ("time_us", ctypes.c_int64),  # since the Unix epoch
    )


class WorkspaceUse(ctypes.Structure):
    """One use of a workspace by a library; ``struct ghost_workspace_use``."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint64),  # bytes, as the library requested them
        ("label", ctypes.c_uint64),  # what the calling thread had set with Ghost.set_label
    )


class CommunicatorUse(ctypes.Structure):
    """A communicator of NCCL, and what has run on it; ``struct ghost_communicator``."""

    _fields_ = (
        ("ranks", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("min_ctas", ctypes.c_int),  # 0 if its configuration does not say, as max_ctas
        ("max_ctas", ctypes.c_int),
        ("shares", ctypes.c_int),  # whether it was split off and uses its parent's connections
        ("all_reduces", ctypes.c_int),  # whether an all-reduce has run on it
        ("collectives", ctypes.c_int),  # whether another collective has
        ("sends", ctypes.c_int),  # ranks that this one has sent to
        ("receives", ctypes.c_int),  # ranks that it has received from
    )


class _DeviceStruct(ctypes.Structure):
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


class _EngineConfigStruct(ctypes.Structure):
    _fields_ = (
        ("workspace", ctypes.c_uint64),
        ("engine", ctypes.c_int64),
        ("numerical_notes", ctypes.c_uint32),
        ("behavior_notes", ctypes.c_uint32),
    )


_SIZE_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.POINTER(CommunicatorUse))
_WORKSPACE_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_EngineConfigStruct), ctypes.c_int
)


class GhostRuntime:
    """The loaded runtime's controls. One per process, created by ``load``.

    ``extensions`` holds the functions that libraries loaded since then import and the runtime lacks.
    """

    def __init__(self, library: ctypes.CDLL, build: BuiltGhost, extensions: ExtensionStubs) -> None:
        self.extensions = extensions
        library.ghost_configure.argtypes = (ctypes.POINTER(_DeviceStruct), ctypes.c_int, ctypes.c_uint64)
        library.ghost_counter.argtypes = (ctypes.c_char_p,)
        library.ghost_counter.restype = ctypes.c_uint64
        library.ghost_set_capacity.argtypes = (ctypes.c_uint64,)
        library.ghost_change_others.argtypes = (ctypes.c_int64,)
        library.ghost_set_context_bytes.argtypes = (ctypes.c_uint64,)
        library.ghost_answer_counts.argtypes = (ctypes.c_uint64,)
        library.ghost_answer_elapsed.argtypes = (ctypes.c_float,)
        library.ghost_gaps_reached.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
        library.ghost_gaps_reached.restype = ctypes.c_size_t
        library.ghost_mark_streams.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        library.ghost_allocation_log.argtypes = (ctypes.POINTER(AllocationLogEvent), ctypes.c_size_t)
        library.ghost_allocation_log.restype = ctypes.c_size_t
        library.ghost_set_label.argtypes = (ctypes.c_uint64,)
        library.ghost_set_answerer.argtypes = (_WORKSPACE_CALLBACK,)
        library.ghost_workspace_uses.argtypes = (ctypes.POINTER(WorkspaceUse), ctypes.c_size_t)
        library.ghost_workspace_uses.restype = ctypes.c_size_t
        library.ghost_set_communicator_sizes.argtypes = (_SIZE_CALLBACK,)
        library.ghost_set_exchange.argtypes = (EXCHANGE_CALLBACK,)
        library.ghost_set_messages.argtypes = (MESSAGE_CALLBACK, MESSAGE_CALLBACK)
        library.ghost_communicator_bytes.restype = ctypes.c_uint64
        self._library = library
        self._thread = threading.local()
        self._build = build
        self.workspaces = WorkspaceSizes.read()

    def configure(
        self,
        device: GhostDevice,
        *,
        count: int = 1,
        in_use: int = 0,
        context: int = 0,
        workspaces: WorkspaceSource = WorkspaceSource.CUDNN,
    ) -> None:
        """Choose the device, before CUDA is initialised; also possible in a forked child.

        Args:
            device: the device to stand in for.
            count: the number of devices.
            in_use: bytes of each that are in use from the start: the CUDA context, other processes.
            context: the share of those bytes that is this process's context.
            workspaces: where workspace sizes come from.

        Raises:
            GhostError: the runtime refused; the message gives the reason.

        """
        name, *figures = astuple(device)
        status = self._library.ghost_configure(_DeviceStruct(name.encode()[:255], *figures), count, in_use)
        if status:
            raise GhostError(
                f"Cannot configure the ghost as {device.name}: {_CONFIGURE_ERRORS.get(status, status)}."
            )
        self._library.ghost_set_context_bytes(context)
        self.workspaces = WorkspaceSizes.read(workspaces, lambda: installed_cudnn_client(device, self._build))
        self.answer_with(self.workspaces.answer)

    def counter(self, name: str) -> int:
        """Return a count of calls since loading, or bytes of the current device.

        Args:
            name: "used", "used_peak", "capacity" (bytes); "mallocs", "frees", "maps", "launches",
                "copies", "library_calls", "cudnn_calls", "waits" (of the host for the device), "replays"
                (of CUDA graphs). For any other name, the result is 0.

        """
        return int(self._library.ghost_counter(name.encode()))

    def set_capacity(self, size: int) -> None:
        """Give every device so many bytes from now on."""
        self._library.ghost_set_capacity(size)

    def take(self, size: int) -> None:
        """Simulate another process that takes bytes of the current device, or releases them if negative."""
        self._library.ghost_change_others(size)

    def hold_events(self, hold: bool) -> None:
        """Hold events recorded from now on at "not ready" until a synchronisation, or stop holding them."""
        self._library.ghost_hold_events(int(hold))

    def finish_late(self) -> None:
        """Have work on a stream finish only when the host waits for it, or for a stream that waits for it."""
        self._library.ghost_hold_events(_HOLD_UNTIL_AWAITED)

    def mark_streams(self, torch_cpu: ctypes.CDLL | None) -> None:
        """Mark in the trace of PyTorch's observer on which streams work runs, and what it waits for.

        Args:
            torch_cpu: PyTorch's library, whose functions leave the marks; None: leave no more.
        """
        functions = (
            ctypes.cast(getattr(torch_cpu, f"aoti_record_function_{name}"), ctypes.c_void_p)
            if torch_cpu
            else None
            for name in ("start", "end")
        )
        self._library.ghost_mark_streams(*functions)

    @contextmanager
    def leaving_no_marks(self) -> Iterator[None]:
        """Leave no marks of what this thread does: it is not the script's doing."""
        self._library.ghost_pause_marks(1)
        try:
            yield
        finally:
            self._library.ghost_pause_marks(0)

    @contextmanager
    def splitting(self, ranks: int, rank: int) -> Iterator[None]:
        """Set the size of communicators that the script splits off, and this process's rank in them."""
        self._library.ghost_expect_split(ranks, rank)
        try:
            yield
        finally:
            self._library.ghost_expect_split(0, 0)

    @contextmanager
    def answering_counts(self, count: int) -> Iterator[None]:
        """Answer this thread's device-to-host copies of at most 8 bytes with a count; an inner one wins."""
        outer: int | None = getattr(self._thread, "count", None)
        self._thread.count = count
        self._library.ghost_answer_counts(count)
        try:
            yield
        finally:
            self._thread.count = outer
            if outer is None:
                self._library.ghost_stop_answering_counts()
            else:
                self._library.ghost_answer_counts(outer)

    @contextmanager
    def answering_elapsed(self, milliseconds: float) -> Iterator[None]:
        """Answer this thread's calls of cudaEventElapsedTime with one duration."""
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

        Includes those of extensions (``ExtensionStubs.imported_by``).
        """
        needed = self._library.ghost_gaps_reached(None, 0)
        text = ctypes.create_string_buffer(needed)
        self._library.ghost_gaps_reached(text, needed)
        return tuple(text.value.decode().split("\n")[:-1])

    def log_allocations(self, on: bool) -> None:
        """Start a new allocation log, or stop logging."""
        self._library.ghost_log_allocations(int(on))

    def set_label(self, label: int) -> None:
        """Tag this thread's next entries of the allocation log."""
        self._library.ghost_set_label(label)

    def answer_with(self, answer: Callable[[bytes], Sequence[EngineConfig]]) -> None:
        """Set the function that returns a library's engines and their workspace sizes.

        Args:
            answer: takes a question in the format of ``memfit.ghost.workspaces``, and returns engine
                configurations in order of preference. It is called on the thread of the library call, and
                must not raise.
        """

        def write(question: bytes, out: "ctypes._Pointer[_EngineConfigStruct]", room: int) -> int:
            configs = answer(question)[:room]
            for i, config in enumerate(configs):
                out[i] = _EngineConfigStruct(
                    config.workspace, config.engine, config.numerical_notes, config.behavior_notes
                )
            return len(configs)

        self._callback = _WORKSPACE_CALLBACK(write)  # referenced here: the runtime holds only its address
        self._library.ghost_set_answerer(self._callback)

    def size_communicators(self, size: Callable[[CommunicatorUse], int]) -> None:
        """Set the function that returns the bytes of device memory of a communicator.

        Args:
            size: is called when a communicator is made, and whenever what has run on it changes, on the
                thread of the library call. It must not raise.
        """
        self._sizes = _SIZE_CALLBACK(
            lambda use: size(use.contents)
        )  # referenced here: the runtime holds only its address
        self._library.ghost_set_communicator_sizes(self._sizes)

    def exchange_between_ranks(self, exchange: Exchange, send: Send, receive: Receive) -> None:
        """Have the ranks of communicators send each other their short buffers: each is a process on a ghost.

        Args:
            exchange: is called for each collective on a short buffer, on the thread of the library call. It
                raises if a rank cannot be reached.
            send: is called likewise for each short buffer that this rank sends to one other.
            receive: is called when this rank reads one that another has sent to it.
        """
        self._exchange = rank_exchange_callback(exchange)  # referenced here, like the others
        self._messages = rank_send_callback(send), rank_receive_callback(receive)
        self._library.ghost_set_messages(*self._messages)
        self._library.ghost_set_exchange(self._exchange)

    def communicator_bytes(self) -> int:
        """Return the most bytes that all communicators have held at one time."""
        return int(self._library.ghost_communicator_bytes())

    def workspace_uses(self) -> list[WorkspaceUse]:
        """Return every use of a workspace by a library, in order, without repetitions."""
        return [use for use in self._logged_workspaces() if use.address]

    def reported_workspaces(self) -> set[int]:
        """Return the sizes that execution plans of cuDNN have reported for their workspaces, in bytes."""
        return {use.size for use in self._logged_workspaces() if not use.address and use.size}

    def plans_without_workspace(self) -> set[int]:
        """Return the labels under which execution plans of cuDNN have run without a workspace."""
        return {use.label for use in self._logged_workspaces() if not use.address and not use.size}

    def _logged_workspaces(self) -> list[WorkspaceUse]:
        return _entries(self._library.ghost_workspace_uses, WorkspaceUse)

    def allocation_log(self) -> list[AllocationLogEvent]:
        """Return every cudaMalloc, cudaFree and stream-ordered variant since the log was started.

        For allocators whose history PyTorch does not record: ``backend:cudaMallocAsync`` and
        ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``.
        """
        return _entries(self._library.ghost_allocation_log, AllocationLogEvent)


def _entries(log: Callable[..., int], kind: type[_Entry]) -> list[_Entry]:
    """Return the entries of a log of the runtime."""
    length = log(None, 0)
    entries = (kind * length)()
    return entries[: log(entries, length)]
