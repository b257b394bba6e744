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
from memfit.ghost.values.received_from_rank import flat, track_sent_elements
from memfit.ghost.values.sent_elements import Combination, exchange_elements, key_of_call, put_received
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
    *("all_to_all_single", "all_gather_into_tensor", "all_reduce", "all_reduce_", "reduce_scatter_tensor"),
    why="know sizes that ranks exchange",
    source="torch/csrc/distributed/c10d/Functional.cpp",
)

Fact = KnownValue | KnownElements | None
_ROUTING = ("allgather", "_allgather_base", "all_gather_single", "alltoall_base", "all_to_all_single")
"""The methods that exchange counts of tokens by expert."""


def track_exchanged_values(values: AssumedValues) -> None:
    """Forget what a collective overwrites, unless this rank's own part tells what it receives.

    Process groups do not increment the versions of tensors.
    """
    if not torch.distributed.is_available():
        return
    for name in _RECEIVING.present():
        _RECEIVING.wrap(name, partial(_receive, values, name))
    track_sent_elements(values)


def override_functional_collectives(values: AssumedValues) -> KernelOverrides:
    """Do the same for the functional collectives, which call no method; return the overrides."""
    overrides = KernelOverrides(_FUNCTIONAL)

    def follow(
        name: str,
        group_name: str,
        tensor: torch.Tensor,
        combination: Callable[[Any], Combination],
        run: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        from torch.distributed import distributed_c10d

        resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
        group = resolve(group_name)
        key = key_of_call(values, "functional", group) if values.senders_exist else ""
        received: list[tuple[Any, Combination]] = []
        finish = exchange_elements(values, key, group, tensor, received)
        combine = combination(group)
        (fact,) = _if_alike(values, group, name, tensor, [combine])
        result = run()
        fact = _received(values, fact, result)
        values.known.put(result, fact, fresh=result is not tensor)
        received.append((result, combine))
        if fact is None:
            finish()
        return result

    @overrides.add("all_to_all_single", "CUDA")
    def all_to_all_single(run: Kernel, tensor: torch.Tensor, received: Any, sent: Any, name: str) -> object:
        def combination(group: Any) -> Combination:
            return partial(_swap_parts, group) if _equal(received) and _equal(sent) else _unknown

        return follow(
            "all_to_all_single", name, tensor, combination, lambda: run(tensor, received, sent, name)
        )

    @overrides.add("all_gather_into_tensor", "CUDA")
    def all_gather_into_tensor(run: Kernel, tensor: torch.Tensor, size: int, name: str) -> object:
        return follow("allgather", name, tensor, lambda _: _join_parts, lambda: run(tensor, size, name))

    @overrides.add("reduce_scatter_tensor", "CUDA")
    def reduce_scatter(run: Kernel, tensor: torch.Tensor, reduction: str, size: int, name: str) -> object:
        def combination(group: Any) -> Combination:
            return partial(_reduce_own_part, group, reduction.upper())

        return follow("", name, tensor, combination, lambda: run(tensor, reduction, size, name))

    for op in ("all_reduce", "all_reduce_"):

        @overrides.add(op, "CUDA")
        def all_reduce(run: Kernel, tensor: torch.Tensor, reduction: str, name: str) -> object:
            combination = partial(_reduce_parts, reduction.upper())
            return follow("", name, tensor, lambda _: combination, lambda: run(tensor, reduction, name))

    return overrides


def _receive(
    values: AssumedValues,
    name: str,
    method: Callable[..., Any],
    group: Any,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Call a method of process groups: forget what it overwrites, and record what is known instead."""
    if group.size() == 1:
        return method(group, *arguments, **options)
    given = (*arguments, *options.values())
    sends = _SENDS[name](group, *given) if name in _SENDS else []
    facts: dict[int, tuple[torch.Tensor, Fact]] = {}
    for sent, receivers in sends:
        alike = _if_alike(values, group, name, sent, [combination for _, combination in receivers])
        facts |= {
            id(to): (to, _received(values, fact, to)) for (to, _), fact in zip(receivers, alike, strict=True)
        }
    keys = [key_of_call(values, name, group) for _ in sends] if values.senders_exist else []
    finish = [exchange_elements(values, key, group, *each) for key, each in zip(keys, sends, strict=False)]
    result = method(group, *arguments, **options)
    for tensor in flat(given[:1]):
        if isinstance(tensor, torch.Tensor) and id(tensor) not in facts:
            values.known.forget(tensor)
    if any(fact is not None for _, fact in facts.values()):
        finish = []
    for each in finish:  # before others are forgotten: what receives may be a view of a known tensor
        for tensor in each():
            facts.pop(id(tensor), None)
    for tensor, fact in facts.values():
        put_received(values.known, tensor, fact)
    return result


def _received(values: AssumedValues, fact: Fact, to: torch.Tensor) -> Fact:
    """Return what is known of a received tensor if the other ranks send what this one sends.

    Ranks that exist send what they have; only how they route is assumed.
    """
    if isinstance(fact, KnownElements):
        if fact.values.numel() != to.numel() or (values.senders_exist and not fact.routing):
            return None
        return fact._replace(values=fact.values.to(to.dtype).reshape(to.shape))
    return None if values.senders_exist else fact


def _if_alike(
    values: AssumedValues, group: Any, name: str, sent: torch.Tensor, combinations: list[Combination]
) -> list[Fact]:
    """Return what each combination makes of what the ranks send, if all send what this one sends."""
    own, size = _own(values, sent), int(group.size())
    if own is None:
        return [None] * len(combinations)
    if isinstance(own, KnownValue):
        uniform = torch.full((size,), own.value, dtype=sent.dtype, device="cpu")
        made = [combination([uniform] * size) for combination in combinations]
        return [None if each is None else own._replace(value=each[0].to(sent.dtype).item()) for each in made]
    parts = [own.values] * size
    if own.routing is TokenCountBasis.SENT and name in _ROUTING and own.values.numel() % size == 0:
        own = own._replace(routing=TokenCountBasis.RECEIVED)
        parts = _routed_parts(values, group, own.values)
    made = [combination(parts) for combination in combinations]
    return [None if each is None else own._replace(values=each) for each in made]


def _own(values: AssumedValues, tensor: torch.Tensor) -> Fact:
    awaits = values.known.awaited(tensor) is not None
    if awaits and (values.senders_exist or tensor.is_floating_point()):
        return None  # weights that another rank sent await nothing here
    return values.known.elements(tensor) or values.known.get(tensor)


def _routed_parts(values: AssumedValues, group: Any, counts: torch.Tensor) -> list[torch.Tensor]:
    """Return the counts that each rank sends: this rank's, but those of this rank's experts."""
    size = int(group.size())
    rows = counts.flatten().repeat(size, 1)
    width = rows.size(1) // size
    rows[:, group.rank() * width : (group.rank() + 1) * width] = _routed(values, rows[0], size)
    return [row.view(counts.shape) for row in rows]


def _name_of_reduction(reduction: tuple[Any, ...]) -> str:
    chosen = getattr(reduction[0], "reduceOp", reduction[0]) if reduction else None
    return "SUM" if chosen is None else str(getattr(chosen, "op", chosen).name)


def _is_root(group: Any, reduction: tuple[Any, ...]) -> bool:
    root = getattr(reduction[0], "rootRank", reduction[0]) if reduction else 0
    return int(root) == int(group.rank())


def _equal(split: Any) -> bool:
    """Return whether a list of split sizes asks for equal parts; what else the argument may be does, too."""
    return not isinstance(split, Sequence) or len(set(split)) <= 1


Sends = list[tuple[Any, list[tuple[Any, Combination]]]]
"""Each tensor that a rank sends, with the tensors that receive and what they hold then."""


def _sends_of_reduction(_group: Any, tensors: Any, *reduction: Any) -> Sends:
    reduce = partial(_reduce_parts, _name_of_reduction(reduction))
    listed = tensors if isinstance(tensors, list | tuple) else [tensors]
    return [(tensor, [(tensor, reduce)]) for tensor in listed]


def _sends_to_root(group: Any, tensors: Any, *reduction: Any) -> Sends:
    sends = _sends_of_reduction(group, tensors, *reduction)
    return [(tensor, received if _is_root(group, reduction) else []) for tensor, received in sends]


def _sends_of_parts(group: Any, output: Any, tensor: Any, *reduction: Any) -> Sends:
    return [(tensor, [(output, partial(_reduce_own_part, group, _name_of_reduction(reduction)))])]


def _sends_of_lists(group: Any, outputs: Any, inputs: Any, *reduction: Any) -> Sends:
    if not isinstance(inputs, list | tuple) or not isinstance(inputs[0], list | tuple):
        return []  # the overload for one tensor
    reduce = partial(_reduce_parts, _name_of_reduction(reduction))
    return [
        (tensor, [(output, reduce)] if rank == group.rank() else [])
        for output, parts in zip(outputs, inputs, strict=True)
        for rank, tensor in enumerate(parts)
    ]


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
    "reduce": _sends_to_root,
    "reduce_scatter": _sends_of_lists,
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), _sends_of_parts),
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


def _reduce_own_part(group: Any, name: str, parts: list[torch.Tensor]) -> torch.Tensor | None:
    reduced = _reduce_parts(name, parts)
    return None if reduced is None else reduced.reshape(group.size(), -1)[group.rank()]


def _join_parts(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts])


def _swap_parts(group: Any, parts: list[torch.Tensor]) -> torch.Tensor | None:
    if parts[0].numel() % group.size():
        return None
    return torch.cat([part.reshape(group.size(), -1)[group.rank()] for part in parts])


def _unknown(_parts: list[torch.Tensor]) -> None:
    """Know nothing of what is received."""


def _routed(values: AssumedValues, counts: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the rows that each rank sends to each of this rank's experts."""
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
