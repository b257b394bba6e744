"""The side that asks: what was kept, and otherwise a process that is started for the first question."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from memfit.errors import MemfitError
from memfit.ghost.build.runtime_library import Build
from memfit.ghost.build.torch_install import find_torch
from memfit.ghost.cudnn.cache import Answer, Configuration, Kept
from memfit.ghost.cudnn.device_properties import properties
from memfit.ghost.cudnn.find_library import find_library
from memfit.ghost.device import GhostDevice
from memfit.native_build import cache_folder
from memfit.python_command import python_code

STARTING = 30.0
"""Seconds in which the process must have loaded cuDNN."""
ANSWERING = 20.0
"""Seconds in which it must have answered."""
_MOST_DEATHS = 2
_LONGEST = 1 << 20  # bytes of an answer


class NoAnswerError(Exception):
    """CuDNN could not be asked, or has no answer; the message says why."""


class _Reply(msgspec.Struct, frozen=True):
    """A line from the process: its version, or configurations, or why there are none."""

    version: int = 0
    process: int = 0
    configurations: tuple[Configuration, ...] | None = None
    refused: str = ""
    missed: tuple[str, ...] = ()


class _Process:
    """The process that asks cuDNN, and the line to it.

    Raises:
        subprocess.SubprocessError: it did not start.
        EOFError: it ended.
    """

    def __init__(self, begin: bytes) -> None:
        self._channel, theirs = socket.socketpair()
        self._lines = self._channel.makefile("rb")
        try:
            with theirs:
                # It forks at once, and what is waited for here is the half that ends: a script that waits
                # for its children never meets ours.
                subprocess.run(
                    [sys.executable, "-c", python_code("memfit.ghost.cudnn.process")],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    check=True,
                    timeout=STARTING,
                )
            self.begun = self.ask(begin, STARTING)
        except BaseException:
            self.close()
            raise

    def ask(self, line: bytes, patience: float) -> _Reply:
        self._channel.settimeout(patience)
        self._channel.sendall(line + b"\n")
        answer = self._lines.readline(_LONGEST)
        if not answer:
            raise EOFError
        return msgspec.json.decode(answer, type=_Reply)

    def close(self) -> None:
        """Let go of it: it ends by itself when nobody is there, or after its own patience."""
        self._lines.close()
        self._channel.close()


class CudnnClient:
    """The installed cuDNN, for one device.

    Safe from several threads, and in forks: a fork has a process of its own. Whatever becomes of that
    process, nobody waits for it longer than ``STARTING + ANSWERING`` seconds, and that once.

    Args:
        library: the libcudnn.so to ask.
        before: what to load before it: the libcuda.so.1 that knows of no device, and then what PyTorch has
            loaded by then. cuDNN 9.13's own search does not lead to cuBLASLt where wheels put it.
        device: what cuDNN is told of, see ``properties.py``.
        kept: the answers of earlier runs.
    """

    def __init__(
        self, library: Path, before: Sequence[Path], device: Mapping[str, object], kept: Kept
    ) -> None:
        self._begin = msgspec.json.encode(
            {"path": str(library), "before": [str(path) for path in before], "properties": device}
        )
        self._kept = kept
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._deaths = 0
        self._given_up = ""
        self.missed: set[str] = set()
        """Functions that cuDNN did not find in the libcuda.so.1, and may offer less for."""
        os.register_at_fork(after_in_child=self._forked)

    def answer(self, question: bytes) -> Answer:
        """Return what cuDNN offers for a tree of its descriptors, see ``process.py``.

        Raises:
            NoAnswerError: there is none, and why.
        """
        with self._lock:
            found = self._kept.get(question)
            if found is None:
                found = self._ask(question)
                self._kept.put(question, found)
            return found

    def version(self) -> int:
        """Return its version (92400 is 9.24.0), having started it if need be.

        Raises:
            NoAnswerError: it cannot be asked, and why.
        """
        with self._lock:
            return self._ask(None).version

    def process(self) -> int:
        """Return the number of the process that answers; 0 if there is none."""
        return self._process.begun.process if self._process is not None else 0

    def _ask(self, question: bytes | None) -> Answer:
        """Start the process if need be, and ask it; None asks no more than its version."""
        if self._given_up:
            raise NoAnswerError(self._given_up)
        try:
            if self._process is None:
                self._process = _Process(self._begin)
            begun = self._process.begun
            if begun.refused:
                raise self._ended(begun.refused, for_good=True)
            if question is None:
                return Answer(begun.version, ())
            reply = self._process.ask(question, ANSWERING)
        except (EOFError, ConnectionError):
            self._deaths += 1
            why = "the process that asks it ended"
            raise self._ended(why, for_good=self._deaths == _MOST_DEATHS) from None
        except TimeoutError:
            raise self._ended("it did not answer in time", for_good=True) from None
        except subprocess.SubprocessError:
            raise self._ended("the process that asks it did not start", for_good=True) from None
        except (OSError, msgspec.DecodeError) as error:
            raise self._ended(f"the process that asks it: {error}", for_good=True) from error
        self.missed.update(reply.missed)
        if reply.configurations is None:
            raise NoAnswerError(f"it refused: {reply.refused}")
        return Answer(begun.version, reply.configurations)

    def _ended(self, why: str, *, for_good: bool) -> NoAnswerError:
        if self._process is not None:
            self._process.close()
            self._process = None
        if for_good:
            self._given_up = why
        return NoAnswerError(why)

    def _forked(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it
        self._ended("", for_good=False)


def installed_cudnn(device: GhostDevice, build: Build) -> CudnnClient:
    """Return the cuDNN that PyTorch would load here, ready to be asked about a device.

    Raises:
        NoAnswerError: there is none.
    """
    try:
        torch = find_torch().folder
    except MemfitError as error:
        raise NoAnswerError(str(error)) from error

    def find(name: str) -> Path | None:
        soname = next((soname for soname in build.sonames if soname.startswith(f"{name}.so")), None)
        return find_library(soname, torch) if soname else None

    library, cublas = find("libcudnn"), find("libcublasLt")
    if library is None:
        raise NoAnswerError("libcudnn is not installed (pip install torch brings it)")
    before = [build.no_device, *([cublas] if cublas else [])]
    told = properties(device, build.cuda_version)
    return CudnnClient(library, before, told, Kept.of(cache_folder("cudnn"), library, told))
