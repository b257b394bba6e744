"""``accelerate launch``: what it would start and with which environment, by its own parser and its own rules.

Accelerate is asked in a process of its own (``main``): memfit's process imports neither it nor PyTorch. There
its launchers, which would start the script, record what they have been given in place of that.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from memfit.errors import UnsuitableEnvironmentError, UsageError
from memfit.patching.patches import Patch
from memfit.python_command import command_running_module

_LAUNCHERS = Patch("accelerate.commands.launch", "*_launcher", why="record what they would start")
_DEFAULTS = Patch(
    "accelerate.commands.launch",
    "_validate_launch_command",
    why="supply the number and the address of a machine that is not there",
)
_GPUS = Patch(
    *("torch.cuda", "device_count", "is_available", "is_bf16_supported"),
    why="let accelerate launch count the ghost's GPUs",
)
_PREPARED_BY = {
    "simple_launcher": "prepare_simple_launcher_cmd_env",
    "multi_gpu_launcher": "prepare_multi_gpu_env",
    "deepspeed_launcher": "prepare_deepspeed_cmd_env",
}
"""Accelerate's launcher, and its function that returns the environment; all others start no GPU process."""


def ask_accelerate(
    typed: str, options: Sequence[str], environment: Mapping[str, str], *, nproc: int, nnodes: int
) -> dict[str, Any]:
    """Return what ``accelerate launch`` would start.

    Args:
        typed: the launcher as the user wrote it.
        options: what follows it: its options, the script and the script's arguments.
        environment: of this process.
        nproc: processes on each machine that the user asks memfit for; 1 if none.
        nnodes: machines that the user asks memfit for.

    Returns:
        By the names of ``LaunchedScript``: ``command``, ``module``, ``environment``, ``nproc``, ``nnodes``,
        ``machine``; and whether ``torchrun`` would start the script.
    """
    asked = json.dumps({"options": list(options), "nproc": nproc, "nnodes": nnodes})
    command = command_running_module("memfit.run.accelerate_launcher")
    done = subprocess.run(
        [*command, asked], env=dict(environment), capture_output=True, text=True, check=False
    )
    if done.returncode:  # killed, or an error of memfit's own
        raise UnsuitableEnvironmentError(f"{typed}: asking Accelerate failed.\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "not_installed" in answer:
        raise UnsuitableEnvironmentError(
            f"{typed}: {sys.executable} cannot import Accelerate ({answer['not_installed']}). Install it "
            "with pip install accelerate, or start the script without it."
        )
    if "refused" in answer:
        raise UsageError(f"{typed}: {answer['refused']}")
    return answer


def main() -> None:
    """Print, as JSON, what ``accelerate launch`` starts with the options in ``sys.argv``."""
    with redirect_stdout(sys.stderr):  # Accelerate's own messages
        answer = _answer(**json.loads(sys.argv[1]))
    print(json.dumps(answer))


def _answer(options: list[str], nproc: int, nnodes: int) -> dict[str, Any]:
    """Return what Accelerate starts, or why it starts nothing."""
    try:
        from accelerate.commands import launch
    except ImportError as error:
        return {"not_installed": str(error)}
    parser = launch.launch_command_parser()
    parser.error = _refuse
    try:
        arguments = parser.parse_args(options)
    except UsageError as error:
        return {"refused": str(error)}
    except SystemExit:  # after --help
        return {"refused": "the script is missing. Put it after the launcher's options."}
    if (nproc, nnodes) != (1, 1) and arguments.num_processes is None:
        arguments.num_processes, arguments.num_machines = nproc * nnodes, nnodes
    _count_gpus(arguments.num_processes or 1)
    _DEFAULTS.wrap("_validate_launch_command", _with_defaults)
    started: list[dict[str, Any]] = []
    for name in _LAUNCHERS.present():
        _LAUNCHERS.install(name, _recorder(name, launch, started))
    try:
        launch.launch_command(arguments)
    except Exception as error:  # noqa: BLE001 - Accelerate raises anything for a wrong option or file
        default = launch.default_config_file if Path(launch.default_config_file).is_file() else None
        return {"refused": _reason(error, arguments.config_file or default)}
    return started[0]


def _refuse(message: str) -> None:
    raise UsageError(f"{message}.")


def _count_gpus(processes: int) -> None:
    """Have PyTorch report a GPU for each process that the user asks for, as the ghost will."""
    _GPUS.install("is_available", lambda _: lambda: True)
    _GPUS.install("device_count", lambda _: lambda: processes)
    _GPUS.install("is_bf16_supported", lambda _: lambda *_, **__: True)


def _with_defaults(validate: Callable[[Namespace], Any], arguments: Namespace) -> Any:
    """Return what Accelerate reads from options and file, complete for the first of several machines."""
    found = validate(arguments)
    if arguments.machine_rank is None:
        arguments.machine_rank = 0
    arguments.main_process_ip = arguments.main_process_ip or "127.0.0.1"
    arguments.main_process_port = 0  # any free port: the other machines do not exist
    arguments.deepspeed_multinode_launcher = "standard"  # the others reach the other machines by ssh or MPI
    return found


def _recorder(name: str, launch: Any, started: list[dict[str, Any]]) -> Callable[[Any], Any]:
    """Return what replaces one of Accelerate's launchers, for ``Patch.install``."""

    def record(*given: Any) -> None:
        arguments = given[-1]
        by = "" if name in _PREPARED_BY else f"its {name.replace('_', ' ')}"
        by = by or ("mpirun" if arguments.mpirun_hostfile else "--no_python" if arguments.no_python else "")
        if by:
            raise UsageError(f"memfit runs Python scripts on NVIDIA GPUs, and cannot stand in for {by}.")
        made = getattr(launch, _PREPARED_BY[name])(arguments)
        environment = made if isinstance(made, dict) else made[1]
        by_torchrun = name != "simple_launcher"
        machines = arguments.num_machines if by_torchrun else 1
        started.append(
            {
                "command": [arguments.training_script, *arguments.training_script_args],
                "module": bool(arguments.module),
                "environment": {k: v for k, v in environment.items() if os.environ.get(k) != v},
                "nproc": arguments.num_processes // machines if by_torchrun else 1,
                "nnodes": machines,
                "machine": int(arguments.machine_rank) if by_torchrun else 0,
                "torchrun": by_torchrun,
            }
        )

    return lambda _: record


def _reason(error: Exception, file: str | None) -> str:
    """Return why Accelerate starts nothing, and the configuration file that it has read."""
    text = " ".join(str(error).split())
    if not isinstance(error, ValueError | OSError | ImportError):
        text = f"{type(error).__name__}: {text}"
    return text if file is None or file in text else f"{text} (Accelerate has read {file}.)"
