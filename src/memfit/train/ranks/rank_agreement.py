"""The ranks of a job, and what they agree on before any of them acts.

    rank 0  ── part ── part ──┐ agree        ┌ reduce ── update ──┐ agree
    rank 1  ── part ──────────┤ no failure   ┤ reduce ── update ──┤ no failure     ...
    rank 2  ── out of memory ─┘ or all retry └ ...                ┘

All ranks call ``agree`` equally often, and each call also says whether the rank has failed: a rank that
failed takes part in the next call, wherever the others made it. So no rank waits for one that will not come.
Each call names itself and may pass facts. If these are not the same on all ranks, all raise an error: ranks
compare digests of their facts, a number each, in an exchange that they make anyway. Only if these differ do
they exchange the facts themselves, to report the first difference.
The numbers go between the hosts (Gloo): this needs no memory of a GPU, and does not wait for one.
"""

import atexit
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any
from weakref import ref

import torch
from torch import nn

from memfit.errors import RankFailedError, UsageError
from memfit.report.places_in_words import format_ranks
from memfit.strategies.plan import Plan
from memfit.strategies.sharding import world_size
from memfit.train.ranks.lost_ranks import RankProcesses, is_broken_connection
from memfit.user_lines import innermost_line_of_place, user_line_with_package_line

Facts = Mapping[str, str]
"""Values by name, each as it is written in an error."""
_DIGEST_BYTES = 6  # exact in a float64
_FACTS_SHOWN = 4  # values of one fact
_OUT_OF_MEMORY = (
    *("DefaultCPUAllocator", "not enough memory"),  # of the CPU's allocator
    *("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
RAN_OUT, FAILED = 1, 2
"""How a rank failed: it can try again in smaller parts, or it cannot."""
_NUMBERS = 6  # of each exchange, so that any two exchanges fit together


class PeerOutOfMemoryError(Exception):
    """Another rank ran out of memory, and all of them try again."""


class SingleRank:
    """A single process, which agrees with itself at no cost."""

    rank, size = 0, 1
    control: Any = None

    def agree(
        self,
        call: str,  # noqa: ARG002 - as below
        *numbers: float,
        same: Callable[[], Facts] = dict,  # noqa: ARG002
        failure: int = 0,  # noqa: ARG002
    ) -> tuple[float, ...]:
        """Return the numbers."""
        return numbers

    def total(self, *numbers: float) -> tuple[float, ...]:
        """Return the numbers."""
        return numbers

    def total_of_hosts(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def guarded(self, collective: Callable[[], Any]) -> None:
        """Call a function."""
        collective()

    def report(self, error: BaseException, phase: str, *, waiting: bool) -> None:
        """Do nothing: the exception says everything."""


class JobRanks(SingleRank):
    """The ranks of the default process group; create it on all of them at the same time."""

    def __init__(self) -> None:
        self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        group: Any = torch.distributed.new_group(backend="gloo", timeout=_timeout_of_job())
        self.control = group
        atexit.register(_release, ref(self))
        self._store = torch.distributed.distributed_c10d._get_default_store()
        self._prefix = f"memfit/failure/{group.group_name}"
        self._processes = RankProcesses.of(group)
        self._exchanges = 0
        self._call = ""

    def agree(
        self, call: str, *numbers: float, same: Callable[[], Facts] = dict, failure: int = 0
    ) -> tuple[float, ...]:
        """Return the maximum of each number over the ranks; up to two numbers.

        Args:
            call: what all ranks are doing, as errors name it.
            numbers: this rank's.
            same: returns what must be the same on all ranks.
            failure: how this rank failed, if it did: the call and the facts are then not compared.

        Raises:
            PeerOutOfMemoryError: another rank ran out of memory, and this one did not fail.
            RankFailedError: another rank failed for good, or is gone.
            UsageError: the ranks are in different calls, or the facts differ.
        """
        self._call, facts = call, {} if failure else same()
        mark = -math.inf if failure else _digest_of_rank_facts(call, facts)
        own = failure, self.rank + 1 if failure else 0, mark, -abs(mark), *numbers
        key = self._key()
        worst, who, most, least, *maxima = self._exchange([*map(float, own)], torch.distributed.ReduceOp.MAX)
        if worst == FAILED and failure != FAILED:
            raise RankFailedError(self._failure(key) or f"Rank {int(who) - 1} failed, and so this rank ends.")
        if worst == RAN_OUT and not failure:
            raise PeerOutOfMemoryError
        if not failure and most != -least:
            raise self._difference(call, facts)
        return tuple(maxima[: len(numbers)])

    def total(self, *numbers: float) -> tuple[float, ...]:
        """Return the sum of each number over the ranks: only after they agreed that none failed."""
        return tuple(
            self._exchange(list(map(float, numbers)), torch.distributed.ReduceOp.SUM)[: len(numbers)]
        )

    def total_of_hosts(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor on the CPU: only after they agreed that none failed."""
        self.guarded(lambda: torch.distributed.all_reduce(tensor, group=self.control))
        return tensor

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's sum over the ranks, on its device: only after they agreed that none failed."""
        self.guarded(lambda: torch.distributed.all_reduce(tensor))
        return tensor

    def report(self, error: BaseException, phase: str, *, waiting: bool) -> None:
        """Have the other ranks end with this rank's failure, and not with a time-out of their own.

        Does nothing if this rank ends because of another, or has reported the error already.

        Args:
            error: that ends this rank.
            phase: in which it was raised.
            waiting: whether the others take part in ``agree`` next. If not, they may be inside a collective
                operation, which fails when this process ends.

        Raises:
            RankFailedError: another rank failed, and so did a collective operation of this one.
        """
        known = isinstance(error, RankFailedError) or hasattr(error, "is_reported")
        if known or not isinstance(error, Exception):
            return
        error.is_reported = True  # type: ignore[attr-defined]  # to keep the error would keep its frames
        if (lost := self._lost(error)) is not None:
            raise lost from error
        message = f"Rank {self.rank} failed in {phase}{_line_of(error)}: {_first_line(error)}"
        try:
            self._store.compare_set(self._key(), "", f"{message} The other ranks end with it.")
            if waiting:
                self.agree(phase, failure=FAILED)
        except Exception as also:  # noqa: BLE001 - the error that is reported must not be hidden by this one
            error.add_note(f"Rank {self.rank} could not tell the other ranks: {also}")

    def _difference(self, call: str, facts: Facts) -> UsageError:
        """Return the error about what differs, which all ranks raise."""
        own: list[Any] = [None] * self.size
        self.guarded(
            lambda: torch.distributed.all_gather_object(own, (call, dict(facts)), group=self.control)
        )
        error = UsageError(_first_difference_between_ranks(own))
        error.is_reported = True  # type: ignore[attr-defined]
        return error

    def _exchange(self, given: list[float], operation: Any) -> list[float]:
        numbers = torch.zeros(_NUMBERS, dtype=torch.float64, device="cpu")
        numbers[: len(given)] = torch.tensor(given, dtype=torch.float64, device="cpu")
        self.guarded(lambda: torch.distributed.all_reduce(numbers, operation, group=self.control))
        self._exchanges += 1
        return numbers.tolist()

    def guarded(self, collective: Callable[[], Any]) -> None:
        """Run a collective; if a rank has gone, raise what it reported."""
        try:
            collective()
        except RuntimeError as error:
            if (lost := self._lost(error)) is None:
                raise
            raise lost from error

    def _lost(self, error: BaseException) -> RankFailedError | None:
        """Return the error to raise for one that comes from another rank's end."""
        if not isinstance(error, RuntimeError) or is_out_of_memory(error):
            return None
        if known := self._failure(self._key()):
            return RankFailedError(known)
        if not is_broken_connection(error):
            return None
        ended = self._processes.describe(self._processes.ended())
        # The first to see it: the next ranks find the process of this one ended, too.
        key = f"{self._prefix}/lost"
        ended = self._from_store(lambda store: store.compare_set(key, "", ended)) or ended
        where = f" in {self._call}" if self._call else ""
        return RankFailedError(
            f"{ended} Rank {self.rank} lost the connection to it{where}, and ends. Start the job "
            "again, or have torchrun do so (--max-restarts): a script that calls engine.load continues from "
            "the last save."
        )

    def _failure(self, key: str) -> str:
        """Return what a rank reported; empty if none did."""
        return self._from_store(lambda store: store.get(key) if store.check([key]) else b"")

    def _from_store(self, ask: Callable[[Any], bytes]) -> str:
        try:
            return ask(self._store).decode()
        except RuntimeError:  # the store was on the rank that is gone
            return ""

    def _key(self) -> str:
        return f"{self._prefix}/{self._exchanges}"


def _release(reference: "ref[JobRanks]") -> None:
    """Release a group that the script has destroyed, while Python still runs.

    A thread of Gloo that needs Python's lock while the interpreter ends aborts the process.
    """
    ranks = reference()
    if ranks is not None and not torch.distributed.is_initialized():
        ranks.control = None


def ranks_of_job() -> SingleRank:
    """Return the ranks of the default process group; without one, or alone in it, a single process."""
    return SingleRank() if world_size() == 1 else JobRanks()


def _timeout_of_job() -> timedelta | None:
    """Return how long the job's own collectives wait for a rank; None for PyTorch's default.

    ``new_group`` does not take it over from ``init_process_group``.
    """
    group: Any = torch.distributed.group.WORLD
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def _line_of(error: BaseException) -> str:
    """Return the innermost line of the user's code in an exception's traceback, as `` (train.py:46)``."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        lines.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    line = innermost_line_of_place(user_line_with_package_line(reversed(lines)))
    return f" ({line})" if line else ""


def _first_line(error: BaseException) -> str:
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception or its cause reports that the GPU or the CPU is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and any(message in str(error) for message in _OUT_OF_MEMORY):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def _digest_of_rank_facts(call: str, facts: Facts) -> float:
    """Return a number that is the same for the same call and facts, and almost surely another for others."""
    text = "\0".join([call, *(f"{name}\0{value}" for name, value in facts.items())])
    return float(int.from_bytes(blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()))


def _first_difference_between_ranks(ranks: Sequence[tuple[str, Facts]]) -> str:
    """Return a message about the first difference between ranks.

    Args:
        ranks: of each rank, the call that it is in, and its facts.

    >>> print(
    ...     _first_difference_between_ranks([("engine.step", {"lr": "0.1"}), ("engine.step", {"lr": "0.2"})])
    ... )
    The ranks have different settings: lr is 0.1 on rank 0, and 0.2 on rank 1. Pass the same on all ranks.
    """
    calls = [call for call, _ in ranks]
    if len(set(calls)) > 1:
        return (
            f"The ranks are in different calls: {_by_value(calls)}. All ranks must make the same calls "
            "of the engine, in the same order. Check conditions such as `if rank == 0`."
        )
    names = dict.fromkeys(name for _, facts in ranks for name in facts)
    for name in names:
        values = [facts.get(name, "not set") for _, facts in ranks]
        if len(set(values)) > 1:
            return (
                f"The ranks have different settings: {name} is {_by_value(values)}. Pass the same on all "
                "ranks."
            )
    return (
        f"The ranks have the same settings in different orders: {', '.join(list(names)[:_FACTS_SHOWN])}, ..."
    )


def _by_value(values: Sequence[str]) -> str:
    """Return which values there are, and on which ranks, as a part of a sentence."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    written = [
        f"{value} on rank{'s' * (len(own) > 1)} {format_ranks(tuple(own))}"
        for value, own in list(ranks.items())[:_FACTS_SHOWN]
    ]
    if len(ranks) > _FACTS_SHOWN:
        written.append("others on other ranks")
    return f"{', '.join(written[:-1])}, and {written[-1]}"


def engine_settings_as_text(model: nn.Module, plan: Plan, options: dict[str, Any]) -> dict[str, str]:
    """Return the options of an engine, the settings of its plan, and the parameters of its model."""
    found = {name: _written(value) for name, value in options.items()}
    for strategy in plan.strategies():
        for field in fields(strategy):
            value = getattr(strategy, field.name)
            if value is not None:
                found[f"{type(strategy).__name__}.{field.name}"] = _written(value)
    for name, parameter in model.named_parameters():
        trains = "trainable" if parameter.requires_grad else "frozen"
        found[f"the parameter {name!r}"] = f"{tuple(parameter.shape)}, {parameter.dtype}, {trains}"
    return found


def optimizer_settings_as_text(optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, str]:
    """Return the class of an optimizer, the settings of its groups, and the class of its scheduler."""
    found = {"the optimizer": type(optimizer).__name__, "the scheduler": type(scheduler).__name__}
    for number, group in enumerate(optimizer.param_groups):
        elements = sum(each.numel() for each in group["params"])
        found[f"optimizer.param_groups[{number}]"] = (
            f"{len(group['params'])} parameters of {elements} elements"
        )
        found |= {_entry(number, name): _written(value) for name, value in group.items() if name != "params"}
    return found


def learning_rates_as_text(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the learning rates of the groups that have one."""
    return {
        _entry(number, "lr"): _written(group["lr"])
        for number, group in enumerate(optimizer.param_groups)
        if "lr" in group
    }


def _entry(number: int, name: str) -> str:
    return f"optimizer.param_groups[{number}][{name!r}]"


def _written(value: Any) -> str:
    """Return a value as text; of objects only the class, because a ``repr`` may differ between processes."""
    if isinstance(value, torch.Tensor):
        # Reading a value on a GPU would wait for it.
        return repr(value.tolist()) if value.is_cpu else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_written, value))})"
    if isinstance(value, bool | int | float | str | None) or is_dataclass(value):
        return repr(value)
    return type(value).__name__
