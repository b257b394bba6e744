"""The options of DeepSpeed's launcher: how many processes it would start, and on which machines.

Source: ``deepspeed/launcher/runner.py`` and ``launch.py``, DeepSpeed 0.19.8.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from memfit.errors import UsageError

WITHOUT_VALUE = {
    *("module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi"),
    *("save_pid", "bind_cores_to_rank", "q", "quiet"),
}
"""Options that no value follows, without dashes."""
_SHORT = {"H": "hostfile", "i": "include", "e": "exclude", "num_accelerators": "num_gpus"}
_HOSTFILE = "/job/hostfile"
_SLOTS = re.compile(r"(\S+)\s+slots=(\d+)")
_STARTS_OTHERS = {"autotuning": "starts many jobs", "no_python": "starts a program that is no Python script"}


class StartedProcesses(NamedTuple):
    """The processes that the launcher would start."""

    nproc: int
    """On each machine; 1 where it would start one per GPU."""
    nnodes: int
    machine: int
    """Which of the machines this is."""


def processes_started_by_deepspeed(options: Mapping[str, str]) -> StartedProcesses:
    """Return how many processes ``deepspeed`` would start.

    Args:
        options: by name, without dashes.

    >>> processes_started_by_deepspeed({"num_gpus": "4"}).nproc
    4
    >>> processes_started_by_deepspeed({"include": "localhost:0,2"}).nproc
    2
    """
    options = {_SHORT.get(name, name): value for name, value in options.items()}
    for name, why in _STARTS_OTHERS.items():
        if options.get(name, "") or (name in options and name in WITHOUT_VALUE):
            raise UsageError(f"deepspeed --{name} {why}; memfit runs one. Leave this option out.")
    machines = _filtered(_machines(options), options)
    if (nodes := _number(options, "num_nodes")) > 0:
        machines = dict(list(machines.items())[:nodes])
    if (count := _number(options, "num_gpus")) > 0:
        machines = dict.fromkeys(machines, count)
    counts = set(machines.values())
    if len(counts) != 1:
        listed = ", ".join(f"{machine}: {count}" for machine, count in machines.items())
        raise UsageError(f"deepspeed would start different numbers of processes ({listed}). Give --num_gpus.")
    machine = max(_number(options, "node_rank"), 0)
    return StartedProcesses(counts.pop(), len(machines), machine)


def _number(options: Mapping[str, str], name: str) -> int:
    """Return the number that an option gives; -1 if there is none, as in DeepSpeed."""
    try:
        return int(options.get(name, "-1"))
    except ValueError:
        raise UsageError(f"deepspeed --{name} {options[name]}: this is no number.") from None


def _machines(options: Mapping[str, str]) -> dict[str, int]:
    """Return the number of GPUs of each machine; without a host file, this one, with one for each process."""
    path = Path(options.get("hostfile", _HOSTFILE))
    if not path.is_file():
        return {"localhost": 1}
    lines = (line.strip() for line in path.read_text().splitlines())
    found = [_SLOTS.match(line) for line in lines if line and not line.startswith("#")]
    if not found or None in found:
        raise UsageError(f"deepspeed --hostfile {path}: each line must read as: worker-0 slots=4")
    return {each[1]: int(each[2]) for each in found if each is not None}


def _filtered(machines: dict[str, int], options: Mapping[str, str]) -> dict[str, int]:
    """Return machines as ``--include`` or ``--exclude`` leaves them: ``worker-0@worker-1:0,2``."""
    included, excluded = (_slots(options.get(name, "")) for name in ("include", "exclude"))
    if included:
        return {name: len(slots) or machines.get(name, 1) for name, slots in included.items()}
    left = {name: count - len(excluded.get(name, ())) for name, count in machines.items()}
    return {
        name: count for name, count in left.items() if count > 0 and (name not in excluded or excluded[name])
    }


def _slots(written: str) -> dict[str, Sequence[str]]:
    parts = [each.partition(":") for each in written.split("@") if each]
    return {name: slots.split(",") if slots else () for name, _, slots in parts}
