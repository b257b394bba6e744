"""Sizes and counts that ranks exchange, whose elements are known (``small_tensors.py``).

The other ranks run the same program, so what they send is taken to be what this rank sends: what is gathered
repeats it, a sum is as many times it as there are ranks, and mean, maximum and minimum are it. Counts of
tokens by expert are the exception: an even share would understate what a rank must be ready to receive. By
default, every rank sends all its tokens to one expert of this rank, the most that it can receive;
``routing=even``, a share or a number choose otherwise, spread over the senders and this rank's experts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from memfit.ghost.kernel_override_registry import Kernel, KernelOverrides
from memfit.ghost.values.assumed_values import AssumedValues
from memfit.ghost.values.received_from_rank import track_sent_elements
from memfit.ghost.values.sent_elements import Combination, exchange_elements, key_of_call
from memfit.ghost.values.small_tensors import even_class_counts
from memfit.ghost.values.tensor_facts import KnownElements, KnownValue, TokenCountBasis
from memfit.ghost.values.value_options import chosen_element_count
from memfit.patching.patches import Patch

_RECEIVING = Patch(
    "torch.distributed:ProcessGroup",
    *("allreduce*", "reduce*", "allgather*", "all_gather*", "gather*", "scatter*"),
    *("alltoall*", "all_to_all*", "recv*", "_reduce*", "_allgather*"),
    why="know sizes that ranks exchange",
    source="torch/csrc/distributed/c10d/init.cpp",
)
"""The methods whose first argument receives from other ranks."""
_FUNCTIONAL = Patch(
    "torch:ops._c10d_functional",
    *("all_to_all_single", "all_gather_into_tensor", "all_reduce", "all_reduce_"),
    why="know sizes that ranks exchange",
    source="torch/csrc/distributed/c10d/Functional.cpp",
)

_UNCHANGED = ("AVG", "MIN", "MAX")
"""Reductions of equal operands that return the operand; NCCL has none of bits."""

Fact = KnownValue | KnownElements | None


def track_exchanged_values(values: AssumedValues) -> None:
    """Forget what a collective overwrites, unless this rank's own part tells what it receives.

    Process groups do not increment the versions of tensors.
    """
    if not torch.distributed.is_available():
        return
    exchanges: dict[str, Callable[..., Facts]] = {
        **dict.fromkeys(("allreduce", "allreduce_coalesced"), _reduce_all),
        **dict.fromkeys(("allgather",), _gather_lists),
        **dict.fromkeys(("_allgather_base", "all_gather_single"), _gather),
        **dict.fromkeys(("alltoall_base", "all_to_all_single"), _swap),
    }
    for name in _RECEIVING.present():
        _RECEIVING.wrap(name, partial(_receive, values, name, exchanges.get(name, _nothing)))
    track_sent_elements(values)


def override_functional_collectives(values: AssumedValues) -> KernelOverrides:
    """Do the same for the functional collectives, which call no method; return the overrides."""
    overrides = KernelOverrides(_FUNCTIONAL)

    def group_of(name: str) -> Any:
        from torch.distributed import distributed_c10d

        resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
        return resolve(name)

    @overrides.add("all_to_all_single", "CUDA")
    def all_to_all_single(
        run: Kernel, tensor: torch.Tensor, received: Any, sent: Any, group_name: str
    ) -> object:
        group = group_of(group_name)
        is_equal = _equal(received) and _equal(sent)
        fact = _swapped(values, group, tensor) if is_equal else None
        combination = partial(_swap_parts, group) if is_equal else _unknown
        return follow(group, tensor, combination, fact, lambda: run(tensor, received, sent, group_name))

    @overrides.add("all_gather_into_tensor", "CUDA")
    def all_gather_into_tensor(run: Kernel, tensor: torch.Tensor, size: int, group_name: str) -> object:
        group = group_of(group_name)
        fact = _gathered(values, group, tensor)
        return follow(group, tensor, _join_parts, fact, lambda: run(tensor, size, group_name))

    for op in ("all_reduce", "all_reduce_"):

        @overrides.add(op, "CUDA")
        def all_reduce(run: Kernel, tensor: torch.Tensor, reduction: str, group_name: str) -> object:
            group, name = group_of(group_name), reduction.upper()
            fact = _reduced(values, group, tensor, name)
            reduce = partial(_reduce_parts, name)
            return follow(group, tensor, reduce, fact, lambda: run(tensor, reduction, group_name))

    def follow(
        group: Any,
        tensor: torch.Tensor,
        combination: Combination,
        fact: Fact,
        run: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        key = key_of_call(values, "functional", group) if values.senders_exist else ""
        received: list[tuple[Any, Combination]] = []
        finish = exchange_elements(values, key, group, tensor, received)
        result = run()
        values.known.put(result, _received(values, fact), fresh=result is not tensor)
        received.append((result, combination))
        if _received(values, fact) is None:
            finish()
        return result

    return overrides


def _received(values: AssumedValues, fact: Fact) -> Fact:
    """Return what is known of a received tensor if the other ranks send what this one sends.

    Ranks that exist send what they have; only how they route is assumed.
    """
    routed = isinstance(fact, KnownElements) and fact.routing is TokenCountBasis.RECEIVED
    return fact if routed or not values.senders_exist else None


def _receive(
    values: AssumedValues,
    name: str,
    exchange: Callable[..., Any],
    method: Callable[..., Any],
    group: Any,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Call a method of process groups: forget what it overwrites, and record what is known instead."""
    if group.size() == 1:
        return method(group, *arguments, **options)
    given = (*arguments, *options.values())
    facts = exchange(values, group, *given)
    finish = _begin_exchange(values, name, group, given) if values.senders_exist else []
    _forget(values, given[:1])
    result = method(group, *arguments, **options)
    received = [(tensor, _received(values, fact)) for tensor, fact in facts]
    for tensor, fact in received:
        values.known.put(tensor, fact)
    if not any(fact is not None for _, fact in received):
        for each in finish:
            each()
    return result


def _begin_exchange(
    values: AssumedValues, name: str, group: Any, given: tuple[Any, ...]
) -> list[Callable[[], None]]:
    """Leave what this rank sends in a collective of ranks that exist; return what to call after it."""
    if name not in _SENDS:
        return []
    sends = _SENDS[name](group, *given)
    keys = [key_of_call(values, name, group) for _ in sends]
    return [exchange_elements(values, key, group, *each) for key, each in zip(keys, sends, strict=True)]


Sends = list[tuple[Any, list[tuple[Any, Combination]]]]
"""Each tensor that a rank sends, with the tensors that receive and what they hold then."""


def _sends_of_reduction(_group: Any, tensors: Any, *reduction: Any) -> Sends:
    reduce = partial(_reduce_parts, _name_of_reduction(reduction))
    listed = tensors if isinstance(tensors, list | tuple) else [tensors]
    return [(tensor, [(tensor, reduce)]) for tensor in listed]


def _sends_of_gather(_group: Any, output: Any, tensor: Any, *_: object) -> Sends:
    return [(tensor, [(output, _join_parts)])]


def _sends_of_gathered_lists(group: Any, outputs: Any, inputs: Any, *_: object) -> Sends:
    if not isinstance(inputs, list | tuple):
        return []  # the overload for one tensor
    ranks = range(group.size())
    return [
        (tensor, [(part, itemgetter(rank)) for rank, part in zip(ranks, parts, strict=True)])
        for parts, tensor in zip(outputs, inputs, strict=True)
    ]


def _sends_of_swap(group: Any, output: Any, tensor: Any, *splits: object) -> Sends:
    if not all(_equal(split) for split in splits[:2]):
        return []
    return [(tensor, [(output, partial(_swap_parts, group))])]


_SENDS: dict[str, Callable[..., Sends]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), _sends_of_reduction),
    **dict.fromkeys(("_allgather_base", "all_gather_single"), _sends_of_gather),
    "allgather": _sends_of_gathered_lists,
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), _sends_of_swap),
}
_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda parts: parts.sum(0),
    "AVG": lambda parts: parts.mean(0, dtype=parts.dtype if parts.is_floating_point() else torch.float64),
    "MAX": lambda parts: parts.amax(0),
    "MIN": lambda parts: parts.amin(0),
    "PRODUCT": lambda parts: parts.prod(0),
}


def _reduce_parts(name: str, parts: list[torch.Tensor]) -> torch.Tensor | None:
    return _REDUCTIONS[name](torch.stack(parts)) if name in _REDUCTIONS else None


def _join_parts(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts])


def _swap_parts(group: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    rows = [part.reshape(group.size(), -1)[group.rank()] for part in parts]
    return torch.cat(rows)


def _unknown(_parts: list[torch.Tensor]) -> None:
    """Know nothing of what is received."""


def _forget(values: AssumedValues, received: object) -> None:
    for part in received if isinstance(received, list | tuple) else ():
        if isinstance(part, torch.Tensor):
            values.known.forget(part)
        _forget(values, part)


Facts = list[tuple[torch.Tensor, Fact]]


def _nothing(*_: object) -> Facts:
    return []


def _reduce_all(values: AssumedValues, group: Any, tensors: Any, *reduction: Any) -> Facts:
    """Return what an all-reduce leaves in tensors; without a reduction, it is a sum."""
    name = _name_of_reduction(reduction)
    listed = tensors if isinstance(tensors, list | tuple) else [tensors]
    return [(tensor, _reduced(values, group, tensor, name)) for tensor in listed]


def _name_of_reduction(reduction: tuple[Any, ...]) -> str:
    chosen = getattr(reduction[0], "reduceOp", reduction[0]) if reduction else None
    return "SUM" if chosen is None else str(getattr(chosen, "op", chosen).name)


def _reduced(values: AssumedValues, group: Any, tensor: torch.Tensor, reduction: str) -> Fact:
    """Return what a reduction of tensors returns that all are as this rank's."""
    fact = _own(values, tensor)
    if fact is None or reduction in _UNCHANGED:
        return fact
    if reduction not in ("SUM", "PRODUCT"):
        return None
    size = int(group.size())
    if isinstance(fact, KnownValue):
        return fact._replace(value=fact.value * size if reduction == "SUM" else fact.value**size)
    reduced = fact.values * size if reduction == "SUM" else fact.values**size
    return fact._replace(values=reduced.to(tensor.dtype))


def _gather(
    values: AssumedValues, group: Any, output: torch.Tensor, tensor: torch.Tensor, *_: object
) -> Facts:
    return [(output, _gathered(values, group, tensor))]


def _gather_lists(values: AssumedValues, group: Any, outputs: Any, inputs: Any, *_: object) -> Facts:
    if not isinstance(inputs, list | tuple):
        return []  # the overload for one tensor
    facts: Facts = []
    for parts, tensor in zip(outputs, inputs, strict=True):
        fact = _gathered(values, group, tensor)
        if isinstance(fact, KnownElements):
            rows = fact.values.view(group.size(), *tensor.shape)
            facts += [
                (part, fact._replace(values=row))
                for part, row in zip(parts, rows, strict=True)
                if part.shape == tensor.shape
            ]
        else:
            facts += [(part, fact) for part in parts]
    return facts


def _swap(
    values: AssumedValues, group: Any, output: torch.Tensor, tensor: torch.Tensor, *splits: object
) -> Facts:
    if not all(_equal(split) for split in splits[:2]):
        return []
    return [(output, _swapped(values, group, tensor))]


def _equal(split: Any) -> bool:
    """Return whether a list of split sizes asks for equal parts; what else the argument may be does, too."""
    return not isinstance(split, Sequence) or len(set(split)) <= 1


def _own(values: AssumedValues, tensor: torch.Tensor) -> Fact:
    awaits = values.known.awaited(tensor) is not None
    if awaits and (values.senders_exist or tensor.is_floating_point()):
        return None  # weights that another rank sent await nothing here
    return values.known.elements(tensor) or values.known.get(tensor)


def _gathered(values: AssumedValues, group: Any, tensor: torch.Tensor) -> Fact:
    """Return what ranks gather that each send what this one sends, as one tensor with a row for each."""
    fact = _own(values, tensor)
    if not isinstance(fact, KnownElements):
        return fact
    size = int(group.size())
    rows = fact.values.flatten().repeat(size, 1)
    if fact.routing is TokenCountBasis.SENT and rows.size(1) % size == 0:
        width = rows.size(1) // size
        mine = slice(group.rank() * width, (group.rank() + 1) * width)
        rows[:, mine] = _routed(values, rows[0], size)
        fact = fact._replace(routing=TokenCountBasis.RECEIVED)
    return fact._replace(values=rows.flatten())


def _swapped(values: AssumedValues, group: Any, tensor: torch.Tensor) -> Fact:
    """Return what this rank receives if each rank sends to it what it would send to itself."""
    fact = _own(values, tensor)
    size = int(group.size())
    if not isinstance(fact, KnownElements) or fact.values.numel() % size:
        return fact if isinstance(fact, KnownValue) else None
    flat = fact.values.flatten()
    if fact.routing is TokenCountBasis.SENT:
        return KnownElements(_routed(values, flat, size).flatten(), TokenCountBasis.RECEIVED)
    return fact._replace(values=flat.view(size, -1)[group.rank()].repeat(size))


def _routed(values: AssumedValues, counts: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the rows that each rank sends to each of this rank's experts.

    Args:
        values: chooses how many rows there are.
        counts: of the rows that this rank sends, by expert.
        ranks: how many there are.
    """
    sent = int(counts.sum())
    received = torch.zeros(ranks, counts.numel() // ranks, dtype=counts.dtype, device="cpu")
    choice = values.choose("count", "routing")
    if choice.value == "upper":
        received[:, 0] = sent
    else:
        received = even_class_counts(chosen_element_count(choice.value, ranks * sent, sent), received)
    rows = int(received.sum())
    text = (
        f"the user assumes that this rank receives {rows:,} rows (--values {choice.given})."
        if choice.given
        else f"every rank is assumed to send all its tokens to this rank's experts, {rows:,} rows. "
        "--values routing=even or, for one line, FILE:LINE=… sets it."
    )
    bound = "routing" if choice.value == "upper" else ""
    text = f"A size depends on GPU values: {text}"
    values.assume("the size of routing", "routing", rows, text, sizes=True, bound=bound)
    return received
