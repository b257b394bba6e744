"""Small tensors that ranks send each other, by element: this rank's are left for the others, theirs awaited.

    rank 0                              rank 7
    ------                              ------
    flags = torch.tensor([1, 4096])     flags = torch.zeros(2)
    broadcast(flags, 0)  ── left ──>    broadcast(flags, 0)       awaited: not known yet
                                        size = flags[1] * 2       computed once it is read
                                        torch.empty(int(size))    read: rank 0 runs up to its broadcast

What a script never reads costs nothing, however many parameters a rank broadcasts. memfit does not see when a
script reads a tensor on the CPU: its elements are received at once, unless they look like a parameter's.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from memfit.ghost.rank_exchange_protocol import RankExchange
from memfit.ghost.values.assumed_values import AssumedValues
from memfit.ghost.values.computed_on_cpu import Fact, after_write, known_elements, may_have_known_elements
from memfit.ghost.values.known_values import KnownValues
from memfit.ghost.values.tensor_facts import (
    AwaitedElements,
    KnownElements,
    KnownValueBasis,
    TokenCountBasis,
    is_plain_tensor,
)
from memfit.user_lines import innermost_user_line

_FEW = 16
"""The largest tensor of floats on the CPU, in elements, that is received at once. Parameters are larger."""


def key_of_call(values: AssumedValues, kind: str, group: Any, *call: object) -> str:
    """Return the key of what the next call of a kind in a group sends; empty if nothing is carried."""
    if values.ranks is None or not isinstance(group, torch.distributed.ProcessGroup):
        return ""
    return values.ranks.key("tensor", kind, str(group.group_name), *call)


def leave_elements(values: AssumedValues, key: str, tensor: Any) -> None:
    """Leave the elements of a tensor, if it is small, for the ranks that receive it."""
    ranks = values.ranks
    if ranks is None or not key or not _is_exchanged(ranks, tensor):
        return
    awaited = values.known.awaited(tensor) if tensor.is_cuda else None
    if awaited is not None:
        ranks.leave_awaited(key, lambda: _written(awaited.have()))
    else:
        ranks.leave(key, _written(known_elements(values.known, tensor)))


def await_elements(values: AssumedValues, key: str, tensor: Any, sender: int) -> None:
    """Have a small tensor hold what another rank has left: at once on the CPU, on the GPU once it is read."""
    ranks = values.ranks
    if ranks is None or not key or not _is_exchanged(ranks, tensor):
        return
    receive = partial(_receive, values, ranks, key, sender, tensor.shape, tensor.dtype)
    if tensor.is_cuda:
        put_received(values.known, tensor, AwaitedElements(receive))
    elif (not tensor.is_floating_point() or tensor.numel() <= _FEW) and (had := receive()) is not None:
        tensor.data.copy_(had.values)


Combination = Callable[[list[torch.Tensor]], torch.Tensor | None]
"""What a rank receives from what each rank of a group sends; None if it is unknown."""


def exchange_elements(
    values: AssumedValues, key: str, group: Any, sent: Any, received: list[tuple[Any, Combination]]
) -> Callable[[], list[torch.Tensor]]:
    """Leave what this rank sends in a collective in which all ranks exist.

    Args:
        values: the known values of this rank's tensors.
        key: of the call.
        group: a process group.
        sent: what this rank sends.
        received: each tensor that receives, and what it holds then.

    Returns:
        What to call after the collective: it has small tensors on the GPU hold what they receive, and returns
        these.
    """
    ranks = values.ranks
    if ranks is None or not key or not _is_exchanged(ranks, sent) or not sent.is_cuda:
        return list
    leave_elements(values, f"{key}-{torch.distributed.get_rank()}", sent)
    receives = [
        partial(_receive, values, ranks, f"{key}-{rank}", rank, sent.shape, sent.dtype)
        for rank in torch.distributed.get_process_group_ranks(group)
    ]

    @cache
    def parts() -> list[KnownElements] | None:
        had = [receive() for receive in receives]
        known = [part for part in had if part is not None]
        return known if len(known) == len(had) else None

    def have(combination: Combination, shape: torch.Size, dtype: torch.dtype) -> KnownElements | None:
        known = parts()
        result = combination([part.values for part in known]) if known is not None else None
        if known is None or result is None or result.numel() != shape.numel():
            return None
        return KnownElements(result.to(dtype).reshape(shape), basis=max(part.basis for part in known))

    def finish() -> list[torch.Tensor]:
        small = [each for each in received if _is_exchanged(ranks, each[0]) and each[0].is_cuda]
        for tensor, combination in small:
            awaited = AwaitedElements(partial(have, combination, tensor.shape, tensor.dtype))
            put_received(values.known, tensor, awaited)
        return [tensor for tensor, _ in small]

    return finish


def put_received(known: KnownValues, tensor: torch.Tensor, fact: Fact | None) -> None:
    """Record what a tensor has received; process groups do not increment versions."""
    received = None if fact is None else after_write(known, tensor, fact)
    known.put(*(received or (tensor, None)))


def _is_exchanged(ranks: RankExchange, tensor: Any) -> bool:
    """Return whether the elements of a tensor are carried; the ranks that send and receive it must agree."""
    return (
        is_plain_tensor(tensor)
        and (tensor.is_cuda or (tensor.is_cpu and not ranks.real))
        and may_have_known_elements(tensor)
        and tensor.numel() > 0
    )


def _receive(
    values: AssumedValues, ranks: RankExchange, key: str, sender: int, shape: torch.Size, dtype: torch.dtype
) -> KnownElements | None:
    """Return what another rank has left; None if it does not know it either."""
    try:
        return _read(ranks.receive(key, sender), shape, dtype)
    except LookupError as error:
        own = torch.distributed.get_rank()
        text = f"Rank {own} reads a tensor that rank {sender} sends, but {error}."
        if not dtype.is_floating_point:
            where = innermost_user_line()
            ranks.refuse(f"{where}: {text} To see more, run memfit with --rank {sender}.")
        text += " Its values are unknown."
        values.assume("what another rank sends", "", 0, text, sizes=True)
        return None


_Written = tuple[list[Any], str, tuple[int, ...], int, int] | None


def _written(elements: KnownElements | None) -> _Written:
    """Return elements as plain objects; None if they are unknown."""
    if elements is None:
        return None
    values = elements.values
    flat: list[Any] = values.flatten().tolist()
    name = str(values.dtype).removeprefix("torch.")
    return flat, name, tuple(values.shape), int(elements.routing), int(elements.basis)


def _read(written: _Written, shape: torch.Size, dtype: torch.dtype) -> KnownElements | None:
    """Return what ``_written`` wrote, as a tensor receives it; None if it has another size or dtype."""
    if written is None or torch.Size(written[2]).numel() != shape.numel():
        return None
    flat, name, _, routing, basis = written
    if getattr(torch, name) != dtype:
        return None
    values = torch.tensor(flat, dtype=dtype, device="cpu").reshape(shape)
    return KnownElements(values, TokenCountBasis(routing), KnownValueBasis(basis))
