"""Launchers: run the script behind one itself, as one of its processes; detect torchrun around memfit."""

import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from memfit.errors import UsageError
from memfit.ghost.ranks.wrap_group_creation import wrap_group_creation
from memfit.run.job_rank import ALONE, Rank

LAUNCHERS = ("torchrun", "accelerate")
"""Commands that start a script."""
_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
_ACCELERATE = "accelerate.commands.launch"
_IS_MODULE = {"m", "module"}
_WITHOUT_VALUE = _IS_MODULE | {
    *("no_python", "run_path", "standalone", "use_env", "virtual_local_rank"),  # torchrun
    *("cpu", "debug", "downcast_bf16", "enable_cpu_affinity", "q", "quiet", "same_network"),  # accelerate
    *("multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config"),
    *("dynamo_use_dynamic", "dynamo_use_fullgraph", "dynamo_use_regional_compilation"),
}
"""Options that no value follows, without dashes and with underscores."""
_UNREAD = ("config_file", "no_python", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
}
"""Options of ``accelerate launch`` that reach the script, and the environment variable that each becomes."""
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


def launched_script(command: Sequence[str], *, module: bool) -> LaunchedScript:
    """Return the script that a launcher would start; the command itself if it names no launcher.

    Args:
        command: what the user wrote, for example ``torchrun --standalone train.py --lr 1``.
        module: whether it begins with a module, as after ``python -m``.

    Raises:
        UsageError: memfit does not know what the launcher would start.

    >>> launched_script(["accelerate", "launch", "--mixed_precision=bf16", "train.py"], module=False).command
    ('train.py',)
    """
    name = command[0] if module else Path(command[0]).name
    if name == "torchrun" or (module and name in _TORCHRUN):
        found = _launched(command[:1], command[1:], module=module)
        return replace(found, environment=ALONE.variables(free_port()) | dict(found.environment))
    if not module and name == "accelerate" and list(command[1:2]) == ["launch"]:
        return _launched(command[:2], command[2:], module=module)
    if module and name == _ACCELERATE:
        return _launched(command[:1], command[1:], module=module)
    return LaunchedScript(tuple(command), module)


def rank_started_by_torchrun(environment: Mapping[str, str]) -> Rank | None:
    """Return the rank as which torchrun has started this process; None if it has not, or only this one.

    >>> rank_started_by_torchrun({"WORLD_SIZE": "2"})
    """
    if any(name not in environment for name in _SET_BY_TORCHRUN) or environment["WORLD_SIZE"] == "1":
        return None
    nproc = int(environment["LOCAL_WORLD_SIZE"])
    return Rank(rank=int(environment["RANK"]), nproc=nproc, nnodes=int(environment["WORLD_SIZE"]) // nproc)


def check_world_size_is_one(environment: Mapping[str, str]) -> None:
    """Refuse an environment in which the script would wait for other processes that do not exist.

    Raises:
        UsageError: ``WORLD_SIZE`` is more than 1.
    """
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


def _launched(launcher: Sequence[str], tokens: Sequence[str], *, module: bool) -> LaunchedScript:
    """Return what a launcher, which may be a module, starts when these tokens follow it."""
    name = " ".join(launcher)
    options, rest = _split(tokens)
    if not rest:
        raise UsageError(f"{name}: the script is missing. Put it after the launcher's options.")
    starts = not _IS_MODULE.isdisjoint(options)
    for key in _UNREAD:
        if key in options:
            # With the launcher: the script may need the variables that it sets.
            dropped = _IS_MODULE.union(_UNREAD)
            kept = [f"--{k}={v}" if v else f"--{k}" for k, v in options.items() if k not in dropped]
            without = shlex.join([*["-m"] * module, *launcher, *kept, *["-m"] * starts, *rest])
            raise UsageError(
                f"{name} --{key}: memfit does not support this option. Write {without} in its place."
            )
    nodes = _number(options.get("nnodes", options.get("num_machines", "1")))
    processes = _number(options.get("nproc_per_node", "1"))
    if "num_processes" in options:  # of accelerate, counted over all machines
        processes = _number(options["num_processes"]) // nodes
    variables = {_VARIABLES[key]: value for key, value in options.items() if key in _VARIABLES}
    return LaunchedScript(tuple(rest), starts, variables, processes, nodes)


def _split(tokens: Sequence[str]) -> tuple[dict[str, str], Sequence[str]]:
    """Return a launcher's options by name, and the script with its arguments."""
    options: dict[str, str] = {}
    position = 0
    while position < len(tokens) and tokens[position].startswith("-"):
        if tokens[position] == "--":
            return options, tokens[position + 1 :]
        name, inline, value = tokens[position].partition("=")
        name = name.lstrip("-").replace("-", "_")
        position += 1
        if not inline and name not in _WITHOUT_VALUE:
            value = tokens[position] if position < len(tokens) else ""
            position += 1
        options[name] = value
    return options, tokens[position:]


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
