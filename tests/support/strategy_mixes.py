"""Strategies against loops written by hand, on any of ``networks``.

    EXACT    the same arithmetic in the same order: gradients, parameters, buffers equal bit for bit
    CLOSE    accumulation against the whole batch: sums in another order, equal to rounding; one step, for
             what rounding changed training goes on to change: after three, float32 by hand was up to 1.3e-6
             off float64 by hand

A micro-batch's gradients are added up in the order of micro-batches in both; what is recomputed is computed
by the same operations from the same inputs and random numbers; what is moved or updated earlier is the same
number. Not claimed: accumulation against the whole batch with dropout, which draws others, or with batch
norms.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from memfit.strategies.accumulation import Accumulation
from memfit.strategies.apply import apply
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.offload import Offload
from memfit.strategies.optimizer_state import OptimizerState
from memfit.train.data.split_batch import even_sizes
from memfit.train.engine import Engine
from support.random_networks import Network, mean_loss

LIMITS = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Relative, of the norm over all gradients, and over all parameters."""

AdamW = partial(torch.optim.AdamW, lr=0.01)
Momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
# Adam divides by a gradient's size: where that is nothing but rounding it makes steps of it.


@dataclass(frozen=True)
class Trace:
    """What a run leaves."""

    gradients: list[torch.Tensor]
    """As the optimizer found them, step by step; none where it steps in backward."""
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]


@dataclass(frozen=True)
class Combination:
    """Strategies, and the loop by hand that they are to equal."""

    plan: tuple[Any, ...] = ()
    parts: int = 1
    """Micro-batches by hand."""
    clip: float | None = None
    optimizer: Callable[..., Any] = AdamW
    by_hand: Callable[..., Any] | None = None
    """Another optimizer by hand."""
    steps: int = 3
    """Optimizer steps."""
    door: str = "step"
    """``step``, ``windows``, ``resumed``, ``retried``, or ``applied``: a loop by hand on an applied model."""

    def ours(self, network: Network, dtype: torch.dtype) -> Trace:
        """Train by the engine."""
        model, batches = network.build(dtype), network.batches(self.steps, dtype)
        optimizer = self.optimizer([one for one in model.parameters() if one.requires_grad])
        seen: list[torch.Tensor] = []
        if self.door == "applied":
            apply(model, self.plan)
            _watch(optimizer, seen)
            _loop(model, optimizer, batches, network, self.parts, self.clip)
            return _trace(model, seen)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it does not pay, or not equal the whole batch
            engine = self._engine(model, optimizer)
        if not any(isinstance(one, OptimizerState) and one.step_in_backward for one in self.plan):
            _watch(optimizer, seen)
        torch.manual_seed(network.seed)
        if self.door in ("step", "retried"):
            for batch in batches:
                engine.step(batch)
            return _trace(model, seen)
        loader = [part for batch in batches for part in _parts(batch, self.parts)]
        if self.door == "resumed":
            self._through(engine, loader, until=self.parts + 1)
            saved = engine.state_dict()
            model = replace(network, seed=network.seed + 7).build(dtype)  # other parameters, until it loads
            optimizer = self.optimizer([one for one in model.parameters() if one.requires_grad])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                engine = self._engine(model, optimizer)
            engine.load_state_dict(saved)
            _watch(optimizer, seen)
        self._through(engine, loader)
        return _trace(model, seen)

    def _engine(self, model: nn.Module, optimizer: Any) -> Engine:
        loss = _short_of_memory() if self.door == "retried" else mean_loss
        return Engine(model, list(self.plan), optimizer=optimizer, loss=loss, max_grad_norm=self.clip)

    @staticmethod
    def _through(engine: Engine, loader: list[Any], until: int | None = None) -> None:
        for window in engine.windows(loader):
            for part in window:
                engine.backward(mean_loss(engine.model, part))
                if engine.micro_step == until:
                    return

    def plain(self, network: Network, dtype: torch.dtype, parts: int | None = None) -> Trace:
        """Train by hand; in one part for what is to be close."""
        model, batches = network.build(dtype), network.batches(self.steps, dtype)
        make = self.by_hand or self.optimizer
        optimizer = make([one for one in model.parameters() if one.requires_grad])
        seen: list[torch.Tensor] = []
        _watch(optimizer, seen)
        mean_of_means = self.door in ("windows", "resumed")
        _loop(model, optimizer, batches, network, parts or self.parts, self.clip, mean_of_means)
        return _trace(model, seen)


EXACT: dict[str, Combination] = {
    "plain": Combination(),
    "clipped": Combination(clip=0.1),
    "SGD with momentum": Combination(optimizer=Momentum),
    "foreach": Combination((OptimizerState("foreach"),), by_hand=partial(AdamW, foreach=True)),
    "fused": Combination((OptimizerState("fused"),), by_hand=partial(AdamW, fused=True)),
    "accumulation of 2": Combination((Accumulation(2),), 2),
    "accumulation of 4, clipped": Combination((Accumulation(4),), 4, 0.1),
    "windows of 2": Combination((Accumulation(2),), 2, door="windows"),
    "windows of 4, clipped": Combination((Accumulation(4),), 4, 0.1, door="windows"),
    "resumed inside a window": Combination((Accumulation(2),), 2, door="resumed"),
    "retried when memory ran out": Combination((), 2, door="retried"),
    "accumulation, retried": Combination((Accumulation(2),), 4, 0.1, door="retried"),
    "checkpointed": Combination((Checkpointing("blocks.*"),)),
    "checkpointed, every other, applied": Combination((Checkpointing("blocks.*", every=2),), door="applied"),
    "checkpointed, reentrant": Combination((Checkpointing("blocks.*", use_reentrant=True),)),
    "offloaded": Combination((Offload(min_bytes=0),)),
    "stepped in backward": Combination((OptimizerState(step_in_backward=True),)),
    "stepped in backward, checkpointed, offloaded": Combination(
        (OptimizerState(step_in_backward=True), Checkpointing("blocks.*"), Offload(min_bytes=0))
    ),
    "accumulated, checkpointed, offloaded, clipped, foreach": Combination(
        (Accumulation(2), Checkpointing("blocks.*"), Offload(min_bytes=0), OptimizerState("foreach")),
        2,
        0.1,
        by_hand=partial(AdamW, foreach=True),
    ),
    "the same, windows, resumed": Combination(
        (Accumulation(2), Checkpointing("blocks.*"), Offload(min_bytes=0)), 2, 0.1, door="resumed"
    ),
    "the same, retried": Combination(
        (Accumulation(2), Checkpointing("blocks.*"), Offload(min_bytes=0)), 4, 0.1, door="retried"
    ),
}
OneStep = partial(Combination, optimizer=Momentum, steps=1)
CLOSE: dict[str, Combination] = {
    "accumulation of 2 = whole batch": OneStep((Accumulation(2),)),
    "accumulation of 4 = whole batch": OneStep((Accumulation(4),)),
    "of 3, clipped = whole batch": OneStep((Accumulation(3),), clip=0.1),
    "of single samples = whole batch": OneStep((Accumulation(micro_batch_size=1),)),
    "retried = whole batch": OneStep((), door="retried"),
    "checkpointed, of 2, retried = whole batch": OneStep(
        (Accumulation(2), Checkpointing("blocks.*")), door="retried"
    ),
}


def differing(name: str, network: Network, dtype: torch.dtype = torch.float32) -> list[str]:
    """Return what differs, in any bit, of gradients, parameters and buffers from the loop by hand."""
    ours, plain = EXACT[name].ours(network, dtype), EXACT[name].plain(network, dtype)
    pairs = {"parameters": (ours.parameters, plain.parameters), "buffers": (ours.buffers, plain.buffers)}
    if ours.gradients:
        known = len(ours.gradients)  # of the steps after it was resumed
        pairs["gradients"] = (ours.gradients, plain.gradients[-known:])
    return [
        what
        for what, (left, right) in pairs.items()
        if len(left) != len(right) or not all(map(torch.equal, left, right))
    ]


def error(name: str, network: Network, dtype: torch.dtype) -> float:
    """Return the relative error, of gradients or parameters, the larger, against the whole batch.

    It is promised to be small for networks that are divisible.
    """
    ours, plain = CLOSE[name].ours(network, dtype), CLOSE[name].plain(network, dtype, parts=1)
    return max(_error(ours.gradients, plain.gradients), _error(ours.parameters, plain.parameters))


def _error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    assert len(found) == len(wanted)
    off = sum(
        (left.double() - right.double()).square().sum() for left, right in zip(found, wanted, strict=True)
    )
    size = sum(right.double().square().sum() for right in wanted)
    return float((off / size).sqrt())


def _loop(
    model: nn.Module,
    optimizer: Any,
    batches: list[Any],
    network: Network,
    parts: int,
    clip: float | None,
    mean_of_means: bool = False,
) -> None:
    """Train as people do by hand: each part's mean loss, times its share of the batch."""
    torch.manual_seed(network.seed)
    for batch in batches:
        pieces = _parts(batch, parts)
        for part in pieces:
            share = len(pieces) if mean_of_means else len(batch[1]) / len(part[1])
            loss = mean_loss(model, part)
            (loss if share == 1 else loss / share).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def _parts(batch: Any, parts: int) -> list[Any]:
    sizes = even_sizes(len(batch[1]), parts)
    return list(zip(batch[0].split(sizes), batch[1].split(sizes), strict=True))


def _short_of_memory() -> Callable[..., Any]:
    """Return a loss that has no memory for the second batch that it is given, after its forward."""
    calls = [0]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls[0] += 1
        mean = mean_loss(model, batch)
        if calls[0] == 1:
            raise torch.OutOfMemoryError("by hand")
        return mean

    return loss


def _watch(optimizer: Any, seen: list[torch.Tensor]) -> None:
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(
            one.grad.clone()
            for group in optimizer.param_groups
            for one in group["params"]
            if one.grad is not None
        )
    )


def _trace(model: nn.Module, seen: list[torch.Tensor]) -> Trace:
    return Trace(seen, [one.detach().clone() for one in model.parameters()], [*model.buffers()])
