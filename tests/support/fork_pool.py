"""A warm process on the ghost that forks one child per job.

    this process             warm process                    one child per job
    ------------             ------------                    -----------------
    ForkPool() ──starts────> load ghost, import torch
    run()      ──socket────> fork ─────────────────────────> call the target once
               <─────────────────────────────── result ───── and exit

Importing torch takes seconds and a fork takes milliseconds, so a function that must run many times on the
ghost (with other plans, capacities or injected faults) runs here. Each child initialises CUDA itself: the
warm process never initialises it, never runs a backward (autograd's threads do not survive a fork) and
never runs user code.

Arguments and results are JSON: nothing is pickled.
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
from memfit.ghost.build.runtime_library import BuiltGhost
from memfit.ghost.ghost_device import GhostDevice
from memfit.ghost.load_ghost import load
from memfit.ghost.runtime_bindings import GhostRuntime

_READY = b"ready"
_JOB = b"job"


class PoolJob(msgspec.Struct, frozen=True):
    """One function call to run on the ghost."""

    target: str
    """``package.module:function`` or ``path/to/file.py:function``."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the target: JSON values."""
    device: GhostDevice | None = None
    """The device to stand in for; the pool's if None."""
    in_use: int = 0
    """Bytes of the device in use from the start: CUDA context and other processes."""
    environment: dict[str, str] = {}
    """Environment variables, set before CUDA is initialised: ``PYTORCH_ALLOC_CONF``."""


class _ChildResult(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    traceback: str = ""


class ForkPool:
    """A warm process that runs jobs in forked children. Use it as a context manager.

    Args:
        build: the built ghost.
        device: the device of jobs that name none.

    Raises:
        GhostError: the warm process could not be started.

    >>> with ForkPool(build_ghost(), device) as pool:  # doctest: +SKIP
    ...     pool.run(PoolJob("script.py:peak", {"batch": 8}))
    """

    def __init__(self, build: BuiltGhost, device: GhostDevice) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            )
        self._control.sendall(_frame(msgspec.json.encode(build, enc_hook=str)))
        if self._control.recv(len(_READY)) != _READY:
            self.close()
            raise GhostError(
                "ForkPool: the process that loads PyTorch for all jobs did not start. Its error is printed "
                "above."
            )

    def run(self, job: PoolJob) -> Any:  # whatever JSON the target returns
        """Run one job in its own process and return the target's result.

        Raises:
            TargetError: the target raised (the message has its traceback) or its process died.
            GhostError: the warm process has ended.
        """
        if job.device is None:
            job = msgspec.structs.replace(job, device=self._device)
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                try:
                    socket.send_fds(self._control, [_JOB], [theirs.fileno()])
                except OSError as error:
                    raise GhostError("This ForkPool's process has ended. Create a new pool.") from error
            ours.sendall(_frame(msgspec.json.encode(job)))
            reply = _receive_message(ours)
        if reply is None:
            raise TargetError(f"The process that ran {job.target} died without returning a result.")
        result = msgspec.json.decode(reply, type=_ChildResult)
        if result.error:
            raise TargetError(f"{job.target} failed: {result.error}\n{result.traceback}")
        return msgspec.json.decode(result.result)

    def map(self, jobs: Sequence[PoolJob], *, workers: int | None = None) -> list[Any]:
        """Run jobs in parallel, ``workers`` at a time (one per processor by default); results in order."""
        with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as threads:
            return list(threads.map(self.run, jobs))

    def close(self) -> None:
        """End the warm process; children that are still running finish on their own."""
        self._control.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(control: socket.socket) -> None:
    """Run the warm process: fork a child for every socket received, until the pool is closed."""
    request = _receive_message(control)
    if request is None:
        return
    ghost = load(msgspec.json.decode(request, type=BuiltGhost, dec_hook=lambda kind, value: kind(value)))
    _warm_up()
    control.sendall(_READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, len(_JOB), 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as channel:
            if os.fork() == 0:
                control.close()
                _run_child(channel, ghost)
        _reap()


def _warm_up() -> None:
    """Import what every job needs, and nothing that initialises CUDA or starts a thread."""
    import torch
    import torch._dynamo
    import torch.utils.checkpoint

    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def _run_child(channel: socket.socket, ghost: GhostRuntime) -> None:
    """Run one job in this child, send its result, and exit without finalising the interpreter."""
    try:
        request = _receive_message(channel)
        if request is not None:
            channel.sendall(
                _frame(msgspec.json.encode(_call_target(msgspec.json.decode(request, type=PoolJob), ghost)))
            )
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _call_target(job: PoolJob, ghost: GhostRuntime) -> _ChildResult:
    try:
        os.environ.update(job.environment)
        if job.device is not None:
            ghost.configure(job.device, in_use=job.in_use)
        result = _import_target(job.target)(**job.arguments)
        return _ChildResult(result=msgspec.Raw(msgspec.json.encode(result)))
    except BaseException as error:  # noqa: BLE001 - the target is user code, and any exception is a result
        summary = traceback.format_exception_only(error)[-1].strip()
        return _ChildResult(error=summary, traceback=traceback.format_exc())


def _import_target(target: str) -> Any:
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
    """Reap children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


def _frame(message: bytes) -> bytes:
    return len(message).to_bytes(8, "little") + message


def _receive_message(channel: socket.socket) -> bytes | None:
    """Receive one framed message; None if the other end has closed."""
    header = _receive_exactly(channel, 8)
    return None if header is None else _receive_exactly(channel, int.from_bytes(header, "little"))


def _receive_exactly(channel: socket.socket, size: int) -> bytes | None:
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


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
