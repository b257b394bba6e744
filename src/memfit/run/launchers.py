"""Launchers: run the script behind one itself, as one of its processes; detect torchrun around memfit."""

import os
import socket
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from memfit.errors import UsageError
from memfit.ghost.ranks.wrap_group_creation import wrap_group_creation
from memfit.run.accelerate_launcher import ask_accelerate
from memfit.run.deepspeed_launcher import WITHOUT_VALUE, processes_started_by_deepspeed
from memfit.run.job_rank import ALONE, LOCAL_RANK_ARGUMENT, Rank

_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
_ACCELERATE = "accelerate.commands.launch"
_DEEPSPEED = ("deepspeed", "ds", "deepspeed.launcher.runner")
LAUNCHERS = {
    **dict.fromkeys(("torchrun", *_TORCHRUN), ("-m", "--module", "--nnodes")),
    **dict.fromkeys(("accelerate", "accelerate-launch", _ACCELERATE), ("-m", "--module")),
    **dict.fromkeys(_DEEPSPEED, ("--module",)),
}
"""Commands and modules that start a script, and those of their options that memfit's commands have, too."""
_IS_MODULE = {"m", "module"}
_WITHOUT_VALUE = _IS_MODULE | {"no_python", "run_path", "standalone", "use_env", "virtual_local_rank"}
"""Options of torchrun that no value follows, without dashes and with underscores."""
_SET_BY_TORCHRUN = (
    *("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)


@dataclass(frozen=True, slots=True)
class LaunchedScript:
    """What a launcher would start."""

    command: tuple[str, ...]
    """The script's path, or the module's name, and its arguments."""
    module: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the launcher sets."""
    nproc: int = 1
    """Processes that it would start on each machine; 1 where it would start one per GPU."""
    nnodes: int = 1
    """Machines that it counts on."""
    machine: int = 0
    """Which of these machines this is."""


def launched_script(
    command: Sequence[str],
    *,
    module: bool,
    nproc: int = 1,
    nnodes: int = 1,
    on_wait: Callable[[str], object] = lambda _: None,
) -> LaunchedScript:
    """Return the script that a launcher would start; the command itself if it names no launcher.

    Args:
        command: what the user wrote, for example ``torchrun --standalone train.py --lr 1``.
        module: whether it begins with a module, as after ``python -m``.
        nproc: processes on each machine that the user asks memfit for; 1 if none.
        nnodes: machines that the user asks memfit for.
        on_wait: called with the reason before something that takes seconds.

    Raises:
        UsageError: the launcher would not start a script, or memfit does not know how.
        UnsuitableEnvironmentError: the launcher is not installed.

    >>> launched_script(["torchrun", "--nproc-per-node=8", "train.py"], module=False).nproc
    8
    """
    name = command[0] if module else Path(command[0]).name
    if name == "torchrun" or (module and name in _TORCHRUN):
        return _launched_by_torchrun(command[0], command[1:])
    if name in _DEEPSPEED:
        return _launched_by_deepspeed(command[0], command[1:])
    if name == (_ACCELERATE if module else "accelerate-launch"):
        typed, options = command[0], command[1:]
    elif not module and [name, *command[1:2]] == ["accelerate", "launch"]:
        typed, options = " ".join(command[:2]), command[2:]
    else:
        return LaunchedScript(tuple(command), module)
    on_wait(f"{typed}: Accelerate reads its options")
    answer = ask_accelerate(typed, options, os.environ, nproc=nproc, nnodes=nnodes)
    variables = ALONE.variables(free_port()) if answer.pop("torchrun") else {}
    answer["environment"] = variables | answer["environment"]
    return LaunchedScript(tuple(answer.pop("command")), **answer)


def rank_started_by_torchrun(environment: Mapping[str, str]) -> Rank | None:
    """Return the rank as which torchrun has started this process; None if it has not, or only this one.

    >>> rank_started_by_torchrun({"WORLD_SIZE": "2"})
    """
    if any(name not in environment for name in _SET_BY_TORCHRUN) or environment["WORLD_SIZE"] == "1":
        return None
    nproc = int(environment["LOCAL_WORLD_SIZE"])
    return Rank(rank=int(environment["RANK"]), nproc=nproc, nnodes=int(environment["WORLD_SIZE"]) // nproc)


def check_world_size_is_one(environment: Mapping[str, str]) -> None:
    """Refuse an environment in which the script would wait for other processes that do not exist."""
    size = environment.get("WORLD_SIZE", "1")
    if size.isdigit() and int(size) > 1:
        raise UsageError(
            f"WORLD_SIZE={size} is set, but memfit runs only one process, and the script would wait for the "
            f"others. Unset it, and write --nproc {size} to run the script as one of {size} processes."
        )


def wrong_group_size_error(size: int, job: Rank) -> str:
    """Return that a script joins a process group of another size than the job's."""
    return (
        f"The script joins a process group of {size}, but memfit runs it as {job}. Write --nproc and "
        f"--nnodes for {size} ranks, or have the script start {job.world_size}."
    )


def refuse_process_groups(refuse: Callable[[str], object], in_script: Callable[[], bool]) -> None:
    """Call ``refuse`` with the reason when the script joins a process group of several processes.

    Call this once PyTorch's ``distributed_c10d`` has been imported.

    Args:
        refuse: called with the reason.
        in_script: returns whether this is the script's own process. The others that it starts may meet each
            other on the CPU.
    """

    def check(size: int) -> None:
        if size > 1:
            refuse(
                f"The script joins a process group of {size}, but memfit runs only one process, and the "
                f"script would wait for the others. Write --nproc {size} to run it as one of {size}."
            )

    def rendezvous(find_peers: Any, url: str, rank: int = -1, world_size: int = -1, **more: Any) -> Any:
        in_url = dict(parse_qsl(urlsplit(url).query)).get("world_size", "")
        if in_script():
            check(world_size if world_size > 0 else int(in_url or os.environ.get("WORLD_SIZE", "1")))
        return find_peers(url, rank, world_size, **more)

    def new_process_group(
        make_group: Any,
        group_size: int,
        group_rank: int,
        ranks: list[int],
        backend: object,
        *args: Any,
        **more: Any,
    ) -> Any:  # the script may pass a store
        # PyTorch's own fake backend needs no other process.
        if str(backend) != "fake" if in_script() else _is_on_gpu(str(backend)):
            check(group_size)
        return make_group(group_size, group_rank, ranks, backend, *args, **more)

    wrap_group_creation(rendezvous, new_process_group)


def _is_on_gpu(backend: str) -> bool:
    """Return whether a process group with this backend uses NCCL."""
    return "nccl" in backend or backend == "undefined"  # then each device has its own


def _launched_by_torchrun(name: str, tokens: Sequence[str]) -> LaunchedScript:
    """Return what torchrun starts when these tokens follow it."""
    options, rest = _split(name, tokens, _WITHOUT_VALUE)
    if "no_python" in options:
        raise UsageError(f"{name} --no_python: memfit runs Python scripts only. Leave this option out.")
    return LaunchedScript(
        tuple(rest),
        not _IS_MODULE.isdisjoint(options),
        ALONE.variables(free_port()),
        nproc=_number(options.get("nproc_per_node", "1")),
        nnodes=_number(options.get("nnodes", "1")),
        machine=_number(options.get("node_rank", "0")),
    )


def _launched_by_deepspeed(name: str, tokens: Sequence[str]) -> LaunchedScript:
    """Return what DeepSpeed's launcher starts when these tokens follow it."""
    options, rest = _split(name, tokens, WITHOUT_VALUE)
    started = processes_started_by_deepspeed(options)
    local_rank = () if "no_local_rank" in options else (LOCAL_RANK_ARGUMENT,)
    return LaunchedScript(
        (rest[0], *local_rank, *rest[1:]),
        "module" in options,
        ALONE.variables(free_port()),
        *started,
    )


def _split(
    launcher: str, tokens: Sequence[str], without_value: Container[str]
) -> tuple[dict[str, str], Sequence[str]]:
    """Return a launcher's options by name, and the script with its arguments."""
    options: dict[str, str] = {}
    rest = list(tokens)
    while rest and rest[0].startswith("-") and (token := rest.pop(0)) != "--":
        name, inline, value = token.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if not inline and name not in without_value:
            value = rest.pop(0) if rest else ""
        options[name] = value
    if not rest:
        raise UsageError(f"{launcher}: the script is missing. Put it after the launcher's options.")
    return options, rest


def _number(written: str) -> int:
    """Return a number of processes or machines; ``gpu`` and ``auto`` are one per GPU, so one.

    >>> _number("1:4")  # the fewest and the most machines of an elastic job
    4
    """
    most = written.rpartition(":")[2]
    return int(most) if most.isdigit() else 1


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
