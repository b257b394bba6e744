"""The warm processes of ``warm_process``: each serves one kind of request, in forks."""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

from support.warm_process import TESTS


def serve():
    """Run the warm process with the ghost; its standard input is the socket."""
    sys.path.remove(TESTS)  # scripts have their own folder there
    from memfit.ghost.build.runtime_library import build_ghost
    from memfit.ghost.load_ghost import load

    built = build_ghost()
    ghost = load(built)
    for module in (
        "memfit.api",
        "memfit.cli.main",
        "memfit.ghost.compile.isolate_torch_compile",
        "memfit.ghost.values.gpu_reads",
        "memfit.recording.recorder",
        "memfit.run.child",
        "sympy",  # of torch._dynamo, which itself must come after memfit's hooks
    ):
        importlib.import_module(module)
    _serve(
        {
            "command line": partial(_command_line, built, ghost),
            "script": partial(_script, built, ghost),
            "script process": partial(_script_process, ghost),
        }
    )


def serve_on_cpu():
    """Run the warm process without a GPU; its standard input is the socket."""
    sys.path.remove(TESTS)
    for module in (
        "torch._dynamo",  # as the first optimizer does
        "memfit.api",
        "memfit.cli.main",
        "memfit.injection.inject_plan",
        "memfit.injection.inject_sharding",
        "memfit.script_training.training_process",
        "memfit.verification.make_runs_comparable",
        "memfit.verification.runs_under_plan",
    ):
        importlib.import_module(module)
    _serve({"verify": _verify, "train": _train})


def _serve(kinds):
    _held = _frozen()
    with socket.socket(fileno=os.dup(0)) as control:
        while True:
            message, files, _, _ = socket.recv_fds(control, 16, 4)
            if not message:
                break
            if os.fork() == 0:
                control.close()
                _serve_one(files, kinds)
            for each in files:
                os.close(each)
            _reap(os.WNOHANG)
    _reap(0)


def _frozen():
    """Have collections of cycles in forks skip all objects that there are, and return as many in their place.

    Python collects when a quarter of all objects are new. Empty lists cost a collection next to nothing.
    """
    gc.collect()
    number = len(gc.get_objects())
    gc.freeze()
    lists = [[] for _ in range(number)]
    gc.collect()
    return lists


def _reap(how):
    try:
        while os.waitpid(-1, how)[0]:
            continue
    except ChildProcessError:  # none is left
        return


def _serve_one(files, kinds):
    """Do what is asked for in this process, and end it."""
    channel = socket.socket(fileno=files[2])
    with channel.makefile("r") as lines:
        request = json.loads(lines.readline())
    if request["kind"] == "script process":
        _start_script_of_a_test(files, channel, request, kinds["script process"])
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
        kinds[request["kind"]](request["argv"], leave)
    except BaseException as error:  # noqa: BLE001 - as where the interpreter ends
        if isinstance(error, SystemExit) and not error.code:
            end(0)
        sys.excepthook(*sys.exc_info())
        end(1)
    end(0)


def _start_script_of_a_test(files, channel, request, run):
    """Fork the process of a script that a test's own process starts, send its exit code, and leave."""

    def script():
        out, err, _, *passed = files
        nothing = os.open(os.devnull, os.O_RDONLY)
        numbers = (0, 1, 2, *request["options"]["pass_fds"])
        for number, file in zip(numbers, (nothing, out, err, *passed), strict=True):
            os.dup2(file, number)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        run(request["argv"], request["options"])

    process = _Fork(os._exit, script)
    channel.sendall(b"%d\n" % process.pid)
    channel.sendall(b"%d\n" % process.wait())
    os._exit(0)


def _script(built, ghost, argv, _leave):
    import memfit.ghost.load_ghost

    memfit.ghost.load_ghost.load = lambda _: _loaded(ghost, built)
    sys.argv[:] = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")
    atexit._run_exitfuncs()


def _loaded(ghost, built):
    """Return the ghost, after the rest of what loading it does."""
    os.environ.setdefault("TRITON_LIBCUDA_PATH", str(built.folder))
    return ghost


def _command_line(built, ghost, argv, leave):
    import memfit.__main__
    import memfit.run.child_start
    from memfit.run.child_start import read_child_settings

    def popen(command, **options):
        start = command.index("-c") + 2
        settings = read_child_settings(Path(command[start]).read_text("ascii"))
        if settings.ghost is None or settings.ghost.build != built:
            return subprocess.Popen(command, **options)
        return _Fork(leave, partial(_script_process, ghost, ["-c", *command[start:]], options))

    memfit.run.child_start.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    sys.argv[:] = ["memfit", *argv]
    memfit.__main__.main()


def _verify(argv, leave):
    import memfit.__main__
    import memfit.verification.runs_under_plan

    def popen(command, **options):
        start = command.index("-c") + 2
        if not json.loads(Path(command[start]).read_text())["on_cpu"]:
            return subprocess.Popen(command, **options)
        return _Fork(leave, partial(_update_process, ["-c", *command[start:]], options))

    memfit.verification.runs_under_plan.subprocess = types.SimpleNamespace(
        **{**vars(subprocess), "Popen": popen}
    )
    sys.argv[:] = ["memfit", *argv]
    memfit.__main__.main()


def _train(argv, _leave):
    import memfit.__main__
    from memfit.script_training import training_process

    def execv(_python, command):
        sys.argv[:] = ["-c", *command[command.index("-c") + 2 :]]
        try:
            training_process.main()
        except SystemExit as end:
            code = end.code or 0
        else:
            code = 0
        atexit._run_exitfuncs()
        os._exit(code)

    os.execv = execv
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    importlib.import_module("sitecustomize")
    sys.argv[:] = ["memfit", *argv]
    memfit.__main__.main()


class _Fork:
    """The script's process, which runs a function: what ``ScriptSubprocess`` has."""

    def __init__(self, leave, run):
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid, self.returncode = os.fork(), None
        if self.pid == 0:
            os._exit = leave
            try:
                run()
            except BaseException:  # noqa: BLE001 - as where the interpreter ends
                sys.excepthook(*sys.exc_info())
            os._exit(1)

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


def _script_process(ghost, argv, options):
    """Run ``memfit.run.child`` in this fork of the process that started the script."""
    import memfit.run.backend
    import memfit.run.child
    from memfit.ghost.load_ghost import wait_until_autograd_threads_sleep

    _become(argv, options)
    atexit.register(wait_until_autograd_threads_sleep)
    memfit.run.backend.load = lambda built: _loaded(ghost, built)
    memfit.run.child.main()


def _update_process(argv, options):
    """Run ``memfit.verification.first_update_process`` in this fork of memfit's process."""
    import memfit.verification.first_update_process

    _become(argv, options)
    os.environ.update(options["env"])
    memfit.verification.first_update_process.main()
    sys.stdout.flush()
    os._exit(0)


def _become(argv, options):
    """Give up the files and exit handlers of memfit's process, as the options of ``Popen`` say."""
    from memfit.run.fork_safety import _forget_exit_handlers

    low = 3
    for kept in (*sorted(options["pass_fds"]), 1 << 16):
        os.closerange(low, kept)
        low = kept + 1
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if options.get(name) == subprocess.DEVNULL:
            os.dup2(nothing, number)
    os.close(nothing)
    _forget_exit_handlers()
    sys.argv[:] = argv
