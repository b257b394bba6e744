"""Run memfit, or a script on the ghost, in a fork of a process that has loaded the ghost and PyTorch.

    tests                    warm process               fork: memfit           fork: the script's process
    -----                    ------------               ------------           --------------------------
    memfit() ──starts once─> ghost, torch, memfit
             ──arguments───> fork ────────────────────> command line ────────> child.main(): script, trace
             <────────────────────────────── exit code ─ report

A dry run of a small script spends nine tenths of its processor time on two Pythons and the import of PyTorch.
This is for tests of what memfit computes and says. Tests of processes, of what scripts do before they import
PyTorch, of its environment variables, and of commands as users write them start ``python -m memfit``;
test_warm_process.py compares the two.
"""

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

SECONDS = 120  # after which a run counts as hanging
TESTS = str(Path(__file__).parents[1])
_started = []  # the warm process and the socket to it
_starting = threading.Lock()


def memfit(*arguments, cwd=None, **environment):
    """Run ``memfit ARGUMENTS`` without input; return a ``subprocess.CompletedProcess`` with text.

    The environment is not for PyTorch, which may have read its variables.
    """
    return _run("command line", arguments, cwd, environment)


def on_ghost(script, *arguments, **environment):
    """Run a script for which ``memfit.ghost.load.load`` returns the ghost; return as ``memfit`` does.

    PyTorch reads PYTORCH_ALLOC_CONF when CUDA is initialised, except for ``backend``.
    """
    return _run("script", (script, *arguments), None, environment)


def stop():
    """End the warm process, if there is one."""
    while _started:
        process, control = _started.pop()
        control.close()
        process.wait()


def _run(kind, arguments, cwd, environment):
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
            socket.send_fds(_control(), [b"run"], [out.fileno(), err.fileno(), theirs.fileno()])
        ours.settimeout(SECONDS)
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


def _control():
    with _starting:
        if not _started:
            _start()
        return _started[0][1]


def _start():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        code = f"import sys; sys.path[0] = {TESTS!r}; from support import warm_process; warm_process.serve()"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs)
    _started.append((process, ours))


def serve():
    """Run the warm process, whose standard input is the socket."""
    sys.path.remove(TESTS)  # scripts have their own folder there
    from memfit.ghost.build.runtime_library import build
    from memfit.ghost.load import load

    built = build()
    ghost = load(built)
    import memfit.cli.main
    import memfit.ghost.compile.torch_compile
    import memfit.ghost.values.gpu_reads
    import memfit.recording.recorder
    import memfit.run.child  # noqa: F401

    with socket.socket(fileno=os.dup(0)) as control:
        while True:
            message, files, _, _ = socket.recv_fds(control, 16, 3)
            if not message:
                break
            if os.fork() == 0:
                control.close()
                _serve_one(files, built, ghost)
            for each in files:
                os.close(each)
            _reap(os.WNOHANG)
    _reap(0)


def _reap(how):
    try:
        while os.waitpid(-1, how)[0]:
            continue
    except ChildProcessError:  # none is left
        return


def _serve_one(files, built, ghost):
    """Do what is asked for in this process, and end it."""
    channel = socket.socket(fileno=files[2])
    with channel.makefile("r") as lines:
        request = json.loads(lines.readline())
    channel.sendall(b"%d\n" % os.getpid())
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, *files[:2])):
        os.dup2(file, number)
        os.close(file)
    leave = os._exit

    def end(code):
        sys.stdout.flush()
        sys.stderr.flush()
        channel.sendall(b"%d\n" % code)
        leave(code)

    os._exit = end
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    try:
        {"command line": _command_line, "script": _script}[request["kind"]](
            request["argv"], built, ghost, leave
        )
    except BaseException as error:  # noqa: BLE001 - as where the interpreter ends
        if isinstance(error, SystemExit) and not error.code:
            end(0)
        sys.excepthook(*sys.exc_info())
        end(1)
    end(0)


def _script(argv, built, ghost, _leave):
    import memfit.ghost.load

    memfit.ghost.load.load = lambda _: _loaded(ghost, built)
    sys.argv[:] = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")
    atexit._run_exitfuncs()


def _loaded(ghost, built):
    """Return the ghost, after the rest of what loading it does."""
    os.environ.setdefault("TRITON_LIBCUDA_PATH", str(built.folder))
    return ghost


def _command_line(argv, built, ghost, leave):
    import memfit.__main__
    import memfit.run.start_script
    from memfit.run.child_settings import read_settings

    def popen(command, **options):
        start = command.index("-c") + 2
        settings = read_settings(Path(command[start]).read_text("ascii"))
        if settings.ghost is None or settings.ghost.build != built:
            return subprocess.Popen(command, **options)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os._exit = leave
            _script_process(["-c", *command[start:]], options, ghost)
        return _Fork(pid)

    memfit.run.start_script.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    sys.argv[:] = ["memfit", *argv]
    memfit.__main__.main()


class _Fork:
    """The script's process: what ``RunningScript`` has."""

    def __init__(self, pid):
        self.pid, self.returncode = pid, None

    def poll(self):
        return self._wait(os.WNOHANG)

    def wait(self):
        return self._wait(0)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def _wait(self, how):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _script_process(argv, options, ghost):
    """Run ``memfit.run.child`` in this fork of memfit's process, which has its files and exit handlers."""
    import memfit.run.backend
    import memfit.run.child
    from memfit.ghost.shutdown import wait_for_autograd
    from memfit.run.fork_state import _forget_exit_handlers

    low = 3
    for kept in (*sorted(options["pass_fds"]), 1 << 16):
        os.closerange(low, kept)
        low = kept + 1
    if options["stdout"] == subprocess.DEVNULL:
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        os.close(nothing)
    _forget_exit_handlers()
    atexit.register(wait_for_autograd)
    memfit.run.backend.load = lambda built: _loaded(ghost, built)
    sys.argv[:] = argv
    try:
        memfit.run.child.main()
    except BaseException:  # noqa: BLE001 - as where the interpreter ends
        sys.excepthook(*sys.exc_info())
    os._exit(1)
