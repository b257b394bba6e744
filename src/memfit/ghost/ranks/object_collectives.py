"""The functions by which one rank sends objects to others: the objects travel through files.

A rank that has objects already (``broadcast_object_list`` of a list without None or ``{}``) keeps them.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from memfit.ghost.ranks.object_exchange_files import ExchangedObjects


def object_collective_wrappers(objects: ExchangedObjects) -> dict[str, Callable[..., Any]]:
    """Return what to wrap around functions of ``torch.distributed`` that exchange objects, by their names."""
    lists = _ObjectLists(objects)
    exchanges = {
        "broadcast_object_list": lists.broadcast,
        "scatter_object_list": lists.scatter,
        "send_object_list": lists.send,
        "recv_object_list": lists.recv,
    }
    return {name: functools.partial(_exchange, objects, exchange) for name, exchange in exchanges.items()}


@dataclass(frozen=True, slots=True)
class _ObjectLists:
    """What the functions do: each takes the original, bound to its arguments, and the arguments by name."""

    objects: ExchangedObjects

    def broadcast(self, run: Callable[[], None], given: Mapping[str, Any]) -> None:
        sender, kept = _rank_of(given, "src", 0), given["object_list"]
        key = self.objects.key("broadcast", _name(given), sender)
        if sender == dist.get_rank():
            self.objects.leave(key, list(kept))
            run()
        elif any(_is_placeholder(each) for each in kept):
            kept[:] = self._receive("broadcast_object_list", key, sender)

    def scatter(self, run: Callable[[], None], given: Mapping[str, Any]) -> None:
        sender, own = _rank_of(given, "src", 0), dist.get_rank()
        ranks = dist.get_process_group_ranks(given["group"] or dist.group.WORLD)
        keys = {rank: self.objects.key("scatter", _name(given), sender, rank) for rank in ranks}
        if sender != own:
            received = self._receive("scatter_object_list", keys[own], sender)
            given["scatter_object_output_list"][0] = received
            return
        for rank, sent in zip(ranks, given["scatter_object_input_list"], strict=True):
            self.objects.leave(keys[rank], sent)
        run()

    def send(self, run: Callable[[], None], given: Mapping[str, Any]) -> None:
        key = self.objects.key("send", _name(given), dist.get_rank(), _rank_of(given, "dst", None))
        self.objects.leave(key, list(given["object_list"]))
        run()

    def recv(self, _run: Callable[[], None], given: Mapping[str, Any]) -> int | None:
        sender = _rank_of(given, "src", None)
        key = self.objects.key("send", _name(given), sender, dist.get_rank())
        given["object_list"][:] = self._receive("recv_object_list", key, sender)
        return sender

    def _receive(self, function: str, key: str, sender: int | None) -> Any:
        own = dist.get_rank()
        try:
            if sender is None:
                raise LookupError("memfit must know which")  # noqa: TRY301 - as other reasons
            return self.objects.receive(key, sender)
        except LookupError as error:
            source = "any rank" if sender is None else f"rank {sender}"
            self.objects.refuse(
                f"torch.distributed.{function}: rank {own} receives an object from {source}, but {error}."
            )
            raise


def _is_placeholder(own: object) -> bool:
    """Return whether an object may stand for one that is yet to come: nothing, or an empty collection.

    >>> [_is_placeholder(each) for each in (None, {}, "run-17", 0)]
    [True, True, False, False]
    """
    return own is None or (isinstance(own, dict | list | set | tuple | str) and not own)


def _exchange(
    objects: ExchangedObjects,
    exchange: Callable[..., Any],
    function: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    """Call ``exchange(run, arguments)`` in place of a function; ``run`` calls it, on the sender alone."""
    given = inspect.signature(function).bind(*args, **options)
    given.apply_defaults()

    def run() -> Any:
        with objects.quiet():
            return function(*args, **options)

    return exchange(run, given.arguments)


def _rank_of(given: Mapping[str, Any], name: str, default: int | None) -> int | None:
    """Return the rank that sends or receives, counted in the whole job; None for any rank."""
    in_group = given.get(f"group_{name}")
    if in_group is None:
        rank: int | None = given[name]
        return default if rank is None else rank
    return dist.get_global_rank(given["group"] or dist.group.WORLD, in_group)  # type: ignore[arg-type]


def _name(given: Mapping[str, Any]) -> str:
    """Return the name of the group, the same on all of its ranks."""
    group: Any = given["group"] or dist.group.WORLD
    return str(group.group_name)
