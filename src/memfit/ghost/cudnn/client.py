"""The client of the cuDNN server: answers from the cache, or from a process started on first use.

The server needs the cuDNN library that PyTorch would load here, and the device to plan for.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from memfit.errors import MemfitError
from memfit.ghost.build.runtime_library import BuiltGhost
from memfit.ghost.build.torch_install import find_torch
from memfit.ghost.cudnn.cache import EngineConfig, HeuristicsCache, HeuristicsResult
from memfit.ghost.ghost_device import GhostDevice
from memfit.native_build import cache_folder
from memfit.python_command import code_running_module

START_TIMEOUT = 30.0
"""Seconds within which the server must have loaded cuDNN."""
ANSWER_TIMEOUT = 20.0
"""Seconds within which the server must have answered a question."""
_MAX_CRASHES = 2
_MAX_REPLY_BYTES = 1 << 20


class NoCudnnAnswerError(Exception):
    """CuDNN could not be queried, or returned no answer; the message gives the reason."""


class _Reply(msgspec.Struct, frozen=True):
    """A line from the server: its version, or engine configurations, or why cuDNN refused."""

    version: int = 0
    process: int = 0
    configurations: tuple[EngineConfig, ...] | None = None
    refused: str = ""
    missed: tuple[str, ...] = ()


class _Server:
    """The server process and the socket to it.

    Raises:
        subprocess.SubprocessError: the process did not start.
        EOFError: the process ended.
    """

    def __init__(self, greeting: bytes) -> None:
        self._channel, server_end = socket.socketpair()
        self._lines = self._channel.makefile("rb")
        try:
            with server_end:
                # The process forks at once and its parent half exits, which is what run() waits for: a script
                # that waits for its own children never meets the server.
                subprocess.run(
                    [sys.executable, "-c", code_running_module("memfit.ghost.cudnn.server")],
                    stdin=server_end.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    check=True,
                    timeout=START_TIMEOUT,
                )
            self.started = self.ask(greeting, START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def ask(self, line: bytes, timeout: float) -> _Reply:
        self._channel.settimeout(timeout)
        self._channel.sendall(line + b"\n")
        answer = self._lines.readline(_MAX_REPLY_BYTES)
        if not answer:
            raise EOFError
        return msgspec.json.decode(answer, type=_Reply)

    def close(self) -> None:
        """Close the socket. The process exits when its client is gone, or at its own timeout."""
        self._lines.close()
        self._channel.close()


class CudnnClient:
    """The installed cuDNN, for one device.

    Thread-safe. A forked child starts a server of its own. Whatever happens to the server, a caller waits at
    most ``START_TIMEOUT + ANSWER_TIMEOUT`` seconds for it, and only once.

    Args:
        library: the libcudnn.so to query.
        before: the libraries to load before it: the libcuda.so.1 that reports no device, then those that
            PyTorch has loaded by then. cuDNN 9.13's own search misses cuBLASLt where wheels install it.
        device: the device's description, see ``cudnn_device_properties``.
        cache: the answers of earlier runs.
    """

    def __init__(
        self, library: Path, before: Sequence[Path], device: Mapping[str, object], cache: HeuristicsCache
    ) -> None:
        self._greeting = msgspec.json.encode(
            {"path": str(library), "before": [str(path) for path in before], "properties": device}
        )
        self._cache = cache
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._crashes = 0
        self._given_up = ""
        self.missed: set[str] = set()
        """Functions that cuDNN did not find in the libcuda.so.1; it may offer fewer engines without them."""
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def answer(self, question: bytes) -> HeuristicsResult:
        """Return cuDNN's engine configurations for a tree of its descriptors, see ``server.py``.

        Raises:
            NoAnswerError: cuDNN gave no answer; the message gives the reason.
        """
        with self._lock:
            found = self._cache.get(question)
            if found is None:
                found = self._ask(question)
                self._cache.put(question, found)
            return found

    def version(self) -> int:
        """Return cuDNN's version (92400 is 9.24.0), starting the server if necessary.

        Raises:
            NoAnswerError: cuDNN cannot be queried; the message gives the reason.
        """
        with self._lock:
            return self._ask(None).version

    def process(self) -> int:
        """Return the server's process ID; 0 if no server is running."""
        return self._server.started.process if self._server is not None else 0

    def _ask(self, question: bytes | None) -> HeuristicsResult:
        """Ask the server, starting it if necessary; None asks for its version only."""
        if self._given_up:
            raise NoCudnnAnswerError(self._given_up)
        try:
            if self._server is None:
                self._server = _Server(self._greeting)
            started = self._server.started
            if started.refused:
                raise self._disconnect(started.refused, for_good=True)
            if question is None:
                return HeuristicsResult(started.version, ())
            reply = self._server.ask(question, ANSWER_TIMEOUT)
        except (EOFError, ConnectionError):
            self._crashes += 1
            reason = "the process that runs cuDNN ended unexpectedly"
            raise self._disconnect(reason, for_good=self._crashes == _MAX_CRASHES) from None
        except TimeoutError:
            raise self._disconnect("cuDNN did not answer in time", for_good=True) from None
        except subprocess.SubprocessError:
            raise self._disconnect("the process that runs cuDNN did not start", for_good=True) from None
        except (OSError, msgspec.DecodeError) as error:
            raise self._disconnect(
                f"lost contact with the process that runs cuDNN: {error}", for_good=True
            ) from error
        self.missed.update(reply.missed)
        if reply.configurations is None:
            raise NoCudnnAnswerError(f"cuDNN rejected the query: {reply.refused}")
        return HeuristicsResult(started.version, reply.configurations)

    def _disconnect(self, reason: str, *, for_good: bool) -> NoCudnnAnswerError:
        """Close the connection, and return the error to raise; ``for_good`` starts no other server."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if for_good:
            self._given_up = reason
        return NoCudnnAnswerError(reason)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it
        self._disconnect("", for_good=False)


def installed_cudnn_client(device: GhostDevice, build: BuiltGhost) -> CudnnClient:
    """Return a client for the cuDNN that PyTorch would load here.

    Raises:
        NoAnswerError: cuDNN is not installed.
    """
    try:
        torch = find_torch().folder
    except MemfitError as error:
        raise NoCudnnAnswerError(str(error)) from error

    def find(name: str) -> Path | None:
        soname = next((soname for soname in build.sonames if soname.startswith(f"{name}.so")), None)
        return find_library_loaded_by_torch(soname, torch) if soname else None

    library, cublas = find("libcudnn"), find("libcublasLt")
    if library is None:
        raise NoCudnnAnswerError("libcudnn is not installed; pip install torch installs it")
    before = [build.no_device, *([cublas] if cublas else [])]
    described = cudnn_device_properties(device, build.cuda_version)
    cache = HeuristicsCache.of(cache_folder("cudnn"), library, described)
    return CudnnClient(library, before, described, cache)


def cudnn_device_properties(device: GhostDevice, cuda_version: str) -> Mapping[str, object]:
    """Return the description of a device for cuDNN.

    cuDNN 9.24 was observed to use only the compute capability (docs/decisions/0013).

    Source: the keys are those of OpenXLA's xla/backends/gpu/target_config/cudnn_device_props.cc; values
    shared by all cards of compute capability 7.0 to 12.0 are from the CUDA C++ Programming Guide, technical
    specifications per compute capability.
    """
    major, minor = (int(part) for part in cuda_version.split(".")[:2])
    return {
        "deviceVer": 100 * device.major + 10 * device.minor,
        "multiProcessorCount": device.multiprocessors,
        "warpSize": 32,
        "maxSharedMemoryPerBlock": device.shared_per_block,
        "maxSharedMemoryPerBlockOptin": device.shared_per_block_optin,
        "reservedSharedMemoryPerBlock": 1024 if device.major >= 8 else 0,  # noqa: PLR2004 - capability 8.0
        "maxRegistersPerSM": 65536,
        "maxCtasPerSM": device.blocks_per_multiprocessor,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": device.threads_per_multiprocessor,
        "regsPerBlock": 65536,
        "totalGlobalMem": device.total_bytes,
        "smClockRateKHz": device.clock_khz,
        "l2CacheSize": device.l2_bytes,
        "maxBlockSize": [1024, 1024, 64],
        "memClockRateKHz": device.memory_clock_khz,
        "memoryBusWidth": device.memory_bus_bits,  # cuDNN 9.28 requires it
        "maxGridSize": [2147483647, 65535, 65535],
        "supportCoopLaunch": 1,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "cudaDeviceId": 0,
        "driverVer": 1000 * major + 10 * minor,
        "deviceName": device.name,
    }


_SYSTEM = ("/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")


def find_library_loaded_by_torch(soname: str, torch_folder: Path) -> Path | None:
    """Return the file that PyTorch would load for a SONAME ("libcudnn.so.9"), or None.

    Source: the RPATH of libtorch_cuda.so in PyTorch's wheels, then _preload_cuda_deps in
    torch/__init__.py 2.14 (nvidia/*/lib of every folder on the path); conda installs it in the
    environment's lib; then the system loader's folders.
    """
    return next((path for folder in _folders(torch_folder) if (path := folder / soname).is_file()), None)


def _folders(torch_folder: Path) -> Iterator[Path]:
    yield torch_folder / "lib"
    for entry in (torch_folder.parent, *map(Path, sys.path)):
        yield from sorted(entry.glob("nvidia/*/lib"))
    yield Path(sys.prefix) / "lib"
    yield from (Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry)
    yield from map(Path, _SYSTEM)
