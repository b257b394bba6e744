"""A fork of the script's process that waits, to go on as another run of the script.

    script's process          standby                     memfit
    ----------------          -------                     ------
    imports, data, model
    fork ───────────────────> waits <──── settings ────── wants another run
    first forward, ...        fork ──> first forward, ... ──> trace
    trace                     waits <──── settings ────── wants one beside it
                              fork ──> first forward, ... ──> trace
                              waits <──── closes ──────── is done

The script is forked at the last moment at which a fork has all that the script has: before it starts threads
or processes that stay, and before GPU work could finish late. Whether they stay is seen later, so that it is
forked before each, and the standby made last is the one that counts. The standby is no child of the script,
which would meet it when it waits for its own.
"""

import ctypes
import errno
import os
import random
import select
import signal
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from memfit.patching.patches import Patch
from memfit.run.descendant_processes import kill_descendants
from memfit.run.fork_safety import (
    gpu_memory_shortage,
    is_thread_harmless_to_fork,
    obstacle_to_fork,
    open_files_of_process,
    repair_fork,
)
from memfit.run.interruption import hold_ctrl_c_back, release_ctrl_c
from memfit.run.script_end import flush_output

if TYPE_CHECKING:
    from memfit.patching.installed_hooks import InstalledHooks

_MODULE = Patch("torch.nn.modules.module:Module", "__call__", why="fork before a model runs on the GPU")
_LOADER = Patch("torch.utils.data.dataloader:DataLoader", "__iter__", why="fork before a loader has workers")
_STREAM = Patch("torch.cuda.streams:Stream", "__new__", why="fork before there is a second stream")
_THREAD = Patch("threading:Thread", "start", why="fork before there is a second thread")
_POOL = Patch("concurrent.futures.thread:ThreadPoolExecutor", "submit", why="fork before a pool has threads")
_PROCESS = Patch("multiprocessing.process:BaseProcess", "__init__", why="fork before another process exists")
_PROGRAM = Patch("subprocess:Popen", "__init__", why="fork before another process exists")

MOST_BYTES = 1 << 16
"""Of one message."""
_INTERVAL = 0.02  # seconds between two looks at a fork
_RECENT = 1.0
"""Seconds for which a standby makes no other necessary: a script may start thousands of threads that end."""
_SIGNALS = {
    signal.SIGINT: signal.SIG_IGN,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,  # unless the script ignores it, as under nohup
    signal.SIGCHLD: signal.SIG_DFL,
}
"""What the standby does on a signal: on Ctrl-C, memfit ends it; only it collects the ends of its forks."""


class StandbyMessage(msgspec.Struct, omit_defaults=True):
    """A message from the script's process or its standby."""

    declined: str = ""
    """Why there is no standby."""
    standby: int = 0
    """The standby's process, in place of the one before."""
    run: int = 0
    """The process of a run that it has started."""
    ended: int | None = None
    """The exit code of that process, as in ``subprocess``; None when it has started."""


class StandbyForker:
    """Forks the script's process: before threads and processes of its own, and at last before it trains.

    Args:
        channel: descriptor of the socket to memfit.
        progress: descriptor of the pipe to memfit.
        go_on: called in a fork that is to be another run, with the path of its settings, and with the module
            that the script is calling, or None.
    """

    def __init__(self, channel: int, progress: int, go_on: Callable[[str, object], None]) -> None:
        self._channel = socket.socket(fileno=channel)
        self._channel.set_inheritable(False)
        self._progress = progress
        self._go_on = go_on
        self._hooks: InstalledHooks | None = None
        self._process = os.getpid()
        self._called: object = None
        self._standby = 0
        """The standby so far."""
        self._made = -_RECENT
        """When it was made."""
        self._submitting = False
        """Whether a pool of threads holds the lock for which ``os.fork`` would wait."""
        self.forking = False
        """Whether the process is being forked by memfit, not by the script."""

    def watch(self) -> None:
        """Wait for the moment: torch has been imported."""
        from memfit.patching.installed_hooks import InstalledHooks

        self._hooks = InstalledHooks()
        self._hooks.wrap(_MODULE, "__call__", self._calls)
        self._hooks.wrap(_LOADER, "__iter__", self._iterates)
        self._hooks.wrap(_STREAM, "__new__", self._before)
        self._hooks.wrap(_THREAD, "start", self._starts)
        self._hooks.wrap(_POOL, "submit", self._submits)
        self._hooks.wrap(_PROCESS, "__init__", self._starts)  # it can be started where it was created
        self._hooks.wrap(_PROGRAM, "__init__", self._starts)

    def _calls(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        parameter = next(module.parameters(), None)
        if parameter is not None and parameter.is_cuda:
            self._called = module
            self.fork()
        return original(module, *args, **kwargs)

    def _iterates(self, original: Callable[..., Any], loader: Any) -> Any:
        if loader.num_workers:
            self.fork()
        return original(loader)

    def _before(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.fork()
        return original(*args, **kwargs)

    def _starts(self, original: Callable[..., Any], started: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_thread_harmless_to_fork(started) and not self._submitting and self._is_due():
            self.fork(last=False)
        return original(started, *args, **kwargs)

    def _submits(self, original: Callable[..., Any], pool: Any, *args: Any, **kwargs: Any) -> Any:
        """Fork before the call, which starts threads while it holds a lock that ``os.fork`` takes.

        Source: Lib/concurrent/futures/thread.py, Python 3.11 (``_global_shutdown_lock``).
        """
        if self._is_due() and not obstacle_to_fork():  # thousands of calls may follow, with threads
            self.fork(last=False)
        self._submitting = True
        try:
            return original(pool, *args, **kwargs)
        finally:
            self._submitting = False

    def _is_due(self) -> bool:
        return time.monotonic() >= self._made + _RECENT

    def fork(self, *, last: bool = True) -> None:
        """Fork a standby in place of the one before; also return in each of its forks, as another run.

        Args:
            last: whether there is no later moment to do so.
        """
        if self._hooks is None or self._hooks.removed or os.getpid() != self._process:
            return
        if last:
            self._hooks.remove()
        files, unsafe = open_files_of_process({self._progress, self._channel.fileno()})
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        if None in handlers.values():
            unsafe = "the script has a signal handler of a library"
        if why := obstacle_to_fork() or unsafe or gpu_memory_shortage():
            self._end(why, last=last)
            return
        flush_output()
        ctypes.CDLL(None).fflush(None)
        state = random.getstate()
        with hold_ctrl_c_back():
            try:
                standby = self._fork_standby()
            except OSError as error:  # too many processes, or too little memory
                self._end(f"its process could not be forked ({error.strerror})", last=last)
                return
            if standby == 0:
                is_ignored = handlers[signal.SIGHUP] is signal.SIG_IGN
                _set_handlers(_SIGNALS | ({signal.SIGHUP: signal.SIG_IGN} if is_ignored else {}))
        if standby:
            if self._standby:
                with suppress(ProcessLookupError):
                    os.kill(self._standby, signal.SIGKILL)
            self._send(StandbyMessage(standby=standby))
            self._standby, self._made = standby, time.monotonic()
            self._end("", last=last)
            return
        self._hooks.remove()
        try:
            path = self._serve()
        except BaseException:  # noqa: BLE001 - the script might catch it, and go on here
            kill_descendants(os.getpid())
            os._exit(1)
        repair_fork(state, files)
        _set_handlers(handlers)
        self._go_on(path, self._called)
        release_ctrl_c()

    def _end(self, declined: str, *, last: bool) -> None:
        """End the last attempt; say why there is no standby, if none was made."""
        if last:
            if not self._standby:
                self._send(StandbyMessage(declined=declined))
            self._channel.close()

    def _fork_standby(self) -> int:
        """Return the standby's process; 0 if this is the standby, and no longer the script's process."""
        reads, writes = os.pipe()
        try:
            between = self._forked()
            if between == 0:
                try:
                    standby = self._forked()
                except OSError:
                    os._exit(1)  # not back into the script: this process is not it
                if standby:
                    os.write(writes, standby.to_bytes(8))
                    os._exit(0)
                return 0
            with suppress(ChildProcessError):  # the script ignores SIGCHLD
                os.waitpid(between, 0)
            os.set_blocking(reads, False)  # it has written, or failed
            try:
                return int.from_bytes(os.read(reads, 8))
            except BlockingIOError:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        finally:
            os.close(reads)
            os.close(writes)

    def _forked(self) -> int:
        self.forking = True
        try:
            with warnings.catch_warnings(
                action="ignore"
            ):  # of threads, which ``obstacle_to_fork`` has looked at
                return os.fork()
        finally:
            self.forking = False

    def _serve(self) -> str:
        """Start a fork for each run that memfit wants; return in the fork, with the path of its settings."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        os.close(nothing)
        running: set[int] = set()
        while path := self._receive(running):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            process = self._forked()
            if process == 0:
                self._channel.close()
                return path
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            running.add(process)
            self._send(StandbyMessage(run=process))
        kill_descendants(os.getpid())
        os._exit(0)

    def _receive(self, running: set[int]) -> str:
        """Return the next path from memfit, empty if memfit is done or has gone; report the runs that end."""
        while not select.select([self._channel], [], [], _INTERVAL if running else None)[0]:
            for process in tuple(running):
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    running.remove(process)
                    self._send(StandbyMessage(run=process, ended=os.waitstatus_to_exitcode(status)))
        try:
            return self._channel.recv(MOST_BYTES).decode(errors="surrogateescape")
        except ConnectionResetError:
            return ""

    def _send(self, message: StandbyMessage) -> None:
        try:
            self._channel.send(msgspec.json.encode(message))
        except OSError:  # memfit has gone, and this process follows
            return


def _set_handlers(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
