"""Run memfit, or a script on the ghost, in a fork of a process that has loaded the ghost and PyTorch.

    tests                    warm process               fork: memfit           fork: the script's process
    -----                    ------------               ------------           --------------------------
    memfit() ──starts once─> ghost, torch, memfit
             ──arguments───> fork ────────────────────> command line ────────> child.main(): script, trace
             <────────────────────────────── exit code ─ report

A dry run of a small script spends nine tenths of its processor time on two Pythons and the import of PyTorch.
``verify_on_cpu()`` runs ``memfit verify`` likewise, in forks of a second process, whose PyTorch sees no GPU;
``train()`` runs ``memfit train`` there, after the ``sitecustomize`` of its ``PYTHONPATH``.
Within ``scripts()``, memfit's functions run scripts in forks of the warm process.

This is for tests of what memfit computes and says. Tests of processes, of what scripts do before they import
PyTorch, of its environment variables, and of commands as users write them start ``python -m memfit``;
test_warm_process.py compares the two.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from support.new_processes import variables_of_ranks

SECONDS = 120  # after which a run counts as hanging
TESTS = str(Path(__file__).parents[1])
_started = {}  # by the function that it runs: a warm process and the socket to it
_starting = threading.Lock()


def memfit(*arguments, cwd=None, **environment):
    """Run ``memfit ARGUMENTS`` without input; return a ``subprocess.CompletedProcess`` with text.

    The environment is not for PyTorch, which may have read its variables.
    """
    return _run("command line", arguments, cwd, environment)


def verify_on_cpu(*arguments):
    """Run ``memfit verify ARGUMENTS``, as ``memfit`` does, where PyTorch finds no GPU."""
    return _run("verify", ("verify", *arguments), None, {})


def train(*arguments, cwd, seconds=SECONDS, **environment):
    """Run ``memfit train ARGUMENTS``, as ``memfit`` does, where PyTorch finds no GPU."""
    return _run("train", ("train", *arguments), cwd, environment, seconds)


def train_ranks(ranks, *arguments, cwd, seconds, **environment):
    """Run ``memfit train ARGUMENTS`` as the ranks of a job; return the code, output and errors of each."""

    def run(variables):
        done = train(*arguments, cwd=cwd, seconds=seconds, **environment, **variables)
        return done.returncode, done.stdout, done.stderr

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, variables_of_ranks(ranks)))


def run(command, *, cwd=None, env=None, **_options):
    """Do what ``subprocess.run`` does with the command ``python -m memfit ARGUMENTS``: for benchmarks."""
    _python, _m, _memfit, *arguments = command
    return memfit(*arguments, cwd=cwd, **(env or {}))


def on_ghost(script, *arguments, **environment):
    """Run a script for which ``memfit.ghost.load_ghost.load`` returns the ghost; return as ``memfit`` does.

    PyTorch reads PYTORCH_ALLOC_CONF when CUDA is initialised, except for ``backend``.
    """
    return _run("script", (script, *arguments), None, environment)


@contextmanager
def scripts():
    """Have memfit, called in this process, run its scripts on the ghost in forks of the warm process."""
    import memfit.run.child_start as module

    before = module.subprocess
    module.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": _script_process})
    try:
        yield
    finally:
        module.subprocess = before


def _script_process(command, **options):
    """Do what ``subprocess.Popen`` does with the command and the options of ``start_script``."""
    from memfit.ghost.build.runtime_library import build_ghost
    from memfit.run.child_start import read_child_settings

    start = command.index("-c") + 2
    settings = read_child_settings(Path(command[start]).read_text("ascii"))
    if settings.ghost is None or settings.ghost.build != build_ghost():
        return subprocess.Popen(command, **options)
    streams = {name: options[name] for name in ("stdin", "stdout", "stderr")}
    request = {
        "kind": "script process",
        "argv": ["-c", *command[start:]],
        "cwd": str(Path.cwd()),
        "environment": dict(os.environ),
        "options": {**streams, "pass_fds": list(options["pass_fds"])},
    }
    return _ScriptProcess(request)


class _ScriptProcess:
    """A fork that runs a script: what ``ScriptSubprocess`` has."""

    def __init__(self, request):
        ours, theirs = socket.socketpair()
        with theirs:
            files = [1, 2, theirs.fileno(), *request["options"]["pass_fds"]]
            socket.send_fds(_control("serve"), [b"run"], files)
        ours.sendall(json.dumps(request).encode() + b"\n")
        self._lines, self.returncode = ours.makefile("r"), None
        self._socket = ours
        self.pid = int(self._lines.readline())

    def poll(self):
        if self.returncode is None and select.select([self._socket], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self):
        if self.returncode is None:
            self.returncode = int(self._lines.readline() or -signal.SIGKILL)
            self._lines.close()
            self._socket.close()
        return self.returncode

    def kill(self):
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def stop():
    """End the warm processes that there are."""
    while _started:
        _, (process, control) = _started.popitem()
        control.close()
        process.wait()


def _run(kind, arguments, cwd, environment, seconds=SECONDS):
    arguments = [str(each) for each in arguments]
    request = {
        "kind": kind,
        "argv": arguments,
        "cwd": str(cwd or Path.cwd()),
        "environment": {**os.environ, **environment},
    }
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with theirs:
            control = _control("serve_on_cpu" if kind in {"verify", "train"} else "serve")
            socket.send_fds(control, [b"run"], [out.fileno(), err.fileno(), theirs.fileno()])
        ours.settimeout(seconds)
        ours.sendall(json.dumps(request).encode() + b"\n")
        with ours.makefile("r") as lines:
            pid = int(lines.readline())
            try:
                code = lines.readline()
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
        return subprocess.CompletedProcess(arguments, int(code) if code else -signal.SIGKILL, *texts)


def _control(server):
    with _starting:
        if server not in _started:
            _started[server] = _start(server)
        return _started[server][1]


def _start(server):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        code = f"import sys; sys.path[0] = {TESTS!r}; from support import warm_server; warm_server.{server}()"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs)
    return process, ours
