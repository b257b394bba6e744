"""A warm process on the ghost that forks one child per candidate.

    this process            warm process                    one child per candidate
    ------------            ------------                    -----------------------
    Pool()  ──starts──────> load ghost, import torch
    run()   ──socket──────> fork ─────────────────────────> call the target, once
            <────────────────────────────────── answer ──── and leave

Importing torch costs seconds and a fork costs milliseconds, so everything that must be tried many
times (plans, advice, capacities, injected faults) is tried here. Each child has CUDA to itself: the
warm process never initialises it, never runs a backward (autograd's threads do not survive a fork)
and never runs user code.

Arguments and answers are JSON: nothing is pickled.
"""

import importlib
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from memfit.errors import GhostError, TargetError
from memfit.ghost.build.runtime_library import Build
from memfit.ghost.device import GhostDevice
from memfit.ghost.ffi import Ghost
from memfit.ghost.load import load
from memfit.python_command import python_code

_READY = b"ready"
_JOB = b"job"


class Candidate(msgspec.Struct, frozen=True):
    """One thing to try on the ghost."""

    target: str
    """``package.module:function`` or ``path/to/file.py:function``."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the target: JSON values."""
    device: GhostDevice | None = None
    """The device to stand in for; the pool's own if None."""
    in_use: int = 0
    """Bytes of it that are taken from the start: CUDA context and other processes."""
    environment: dict[str, str] = {}
    """Environment variables, set before CUDA is initialised: ``PYTORCH_ALLOC_CONF``."""


class _Answer(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    traceback: str = ""


class Pool:
    """A warm process to try candidates in. Use it as a context manager.

    Args:
        build: the ghost, built.
        device: what candidates run on unless they name another.

    Raises:
        GhostError: the warm process could not be started.

    >>> with Pool(build(), device) as pool:  # doctest: +SKIP
    ...     pool.run(Candidate("job.py:peak", {"batch": 8}))
    """

    def __init__(self, build: Build, device: GhostDevice) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", python_code("memfit.ghost.fork_pool"), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            )
        self._control.sendall(_framed(msgspec.json.encode(build, enc_hook=str)))
        if self._control.recv(len(_READY)) != _READY:
            self.close()
            raise GhostError("The warm process of the ghost pool did not start; its own error stands above.")

    def run(self, candidate: Candidate) -> Any:  # whatever JSON the target returns
        """Try one candidate in a process of its own and return what its target returned.

        Raises:
            TargetError: the target raised (its traceback is in the message) or its process died.
        """
        if candidate.device is None:
            candidate = msgspec.structs.replace(candidate, device=self._device)
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                try:
                    socket.send_fds(self._control, [_JOB], [theirs.fileno()])
                except OSError as error:
                    raise GhostError("The warm process of the ghost pool has ended.") from error
            ours.sendall(_framed(msgspec.json.encode(candidate)))
            reply = _received(ours)
        if reply is None:
            raise TargetError(f"The process that tried {candidate.target} died without an answer.")
        answer = msgspec.json.decode(reply, type=_Answer)
        if answer.error:
            raise TargetError(f"{candidate.target} failed: {answer.error}\n{answer.traceback}")
        return msgspec.json.decode(answer.result)

    def map(self, candidates: Sequence[Candidate], *, workers: int | None = None) -> list[Any]:
        """Try candidates side by side, ``workers`` at a time (all processors by default), in order."""
        with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as threads:
            return list(threads.map(self.run, candidates))

    def close(self) -> None:
        """End the warm process; children that are still running end on their own."""
        self._control.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(control: socket.socket) -> None:
    """Be the warm process: fork a child for every socket that arrives, until the pool is closed."""
    request = _received(control)
    if request is None:
        return
    ghost = load(msgspec.json.decode(request, type=Build, dec_hook=lambda kind, value: kind(value)))
    _warm_up()
    control.sendall(_READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, len(_JOB), 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as channel:
            if os.fork() == 0:
                control.close()
                _answer(channel, ghost)
        _reap()


def _warm_up() -> None:
    """Import what every candidate needs, and nothing that would initialise CUDA or start a thread."""
    import torch
    import torch._dynamo
    import torch.utils.checkpoint

    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def _answer(channel: socket.socket, ghost: Ghost) -> None:
    """Be one child: try one candidate, answer, and leave without finalising the interpreter."""
    try:
        request = _received(channel)
        if request is not None:
            channel.sendall(
                _framed(msgspec.json.encode(_try(msgspec.json.decode(request, type=Candidate), ghost)))
            )
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _try(candidate: Candidate, ghost: Ghost) -> _Answer:
    try:
        os.environ.update(candidate.environment)
        if candidate.device is not None:
            ghost.configure(candidate.device, in_use=candidate.in_use)
        result = _find(candidate.target)(**candidate.arguments)
        return _Answer(result=msgspec.Raw(msgspec.json.encode(result)))
    except BaseException as error:  # noqa: BLE001 - the target is the user's; its every end is an answer
        summary = traceback.format_exception_only(error)[-1].strip()
        return _Answer(error=summary, traceback=traceback.format_exc())


def _find(target: str) -> Any:
    """Import ``package.module:function`` or ``file.py:function``."""
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        if spec is None or spec.loader is None:
            raise TargetError(f"Cannot import {place}.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    return getattr(module, name)


def _reap() -> None:
    """Collect children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(8, "little") + message


def _received(channel: socket.socket) -> bytes | None:
    """Receive one framed message; None if the other side has gone."""
    header = _exactly(channel, 8)
    return None if header is None else _exactly(channel, int.from_bytes(header, "little"))


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    message = bytearray()
    while len(message) < size:
        try:
            chunk = channel.recv(size - len(message))
        except ConnectionResetError:
            return None
        if not chunk:
            return None
        message += chunk
    return bytes(message)


def main() -> None:
    """Be the warm process, over the socket on the command line."""
    _serve(socket.socket(fileno=int(sys.argv[1])))
