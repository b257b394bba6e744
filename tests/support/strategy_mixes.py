"""Strategies compared with handwritten training loops, on any of ``networks``.

    EXACT    the same arithmetic in the same order: gradients, parameters, buffers equal bit for bit
    CLOSE    accumulation against the whole batch: sums in another order, equal up to rounding. One step only,
             because training amplifies rounding errors: after three steps, a handwritten loop in float32 was
             up to 1.3e-6 off the same loop in float64

Both add up gradients in the order of the micro-batches; recomputation repeats the same operations on the same
inputs and random numbers; moving a tensor or updating a parameter earlier changes no value. Not claimed:
accumulation against the whole batch with dropout, which draws other random numbers, or with batch norms.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from memfit.strategies.accumulation import Accumulation
from memfit.strategies.apply import apply
from memfit.strategies.batch_slices import BatchSlices
from memfit.strategies.checkpointing import Checkpointing, Region
from memfit.strategies.mechanisms.split_batch import even_micro_batch_sizes
from memfit.strategies.offload import Offload
from memfit.strategies.optimizer_state import OptimizerState
from memfit.train.engine import Engine
from support.late_stream import late_state_copies
from support.random_networks import Network, mean_loss

LIMITS = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Largest relative error allowed, by norm, over all gradients and over all parameters."""

AdamW = partial(torch.optim.AdamW, lr=0.01)
Momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
# CLOSE uses Momentum, because Adam divides by a gradient's magnitude: a gradient that is only rounding error
# becomes a full step.


@dataclass(frozen=True)
class Results:
    """The results of a training run."""

    gradients: list[torch.Tensor]
    """As the optimizer saw them, step by step; empty if it steps in backward."""
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]


@dataclass(frozen=True)
class Combination:
    """Strategies, and the handwritten loop that they must equal."""

    plan: tuple[Any, ...] = ()
    parts: int = 1
    """Micro-batches in the handwritten loop."""
    clip: float | None = None
    scaled: bool = False
    """Whether the handwritten loop scales losses for fp16, and its first step overflows: it is left out."""
    optimizer: Callable[..., Any] = AdamW
    by_hand: Callable[..., Any] | None = None
    """Another optimizer for the handwritten loop."""
    steps: int = 3
    """Optimizer steps."""
    door: str = "step"
    """``step``, ``fit``, ``validated`` (``fit`` with validation), ``windows``, ``resumed``, ``retried``;
    ``applied``: the handwritten loop."""

    @patch("memfit.strategies.mechanisms.single_tensor_recompute.LEAST_RECOMPUTED", 1)  # networks are small
    def ours(self, network: Network, dtype: torch.dtype) -> Results:
        """Train with the engine. A CPU has no side stream: the stand-in for one is as late as it may be."""
        on_gpu = torch.get_default_device().type == "cuda"
        with nullcontext() if on_gpu else late_state_copies():
            return self._trained_by_engine(network, dtype)

    def _trained_by_engine(self, network: Network, dtype: torch.dtype) -> Results:
        model, batches = network.build(dtype), network.batches(self.steps, dtype)
        optimizer = self.optimizer(_trained(model))
        seen: list[torch.Tensor] = []
        if self.door == "applied":
            apply(model, self.plan)
            _watch(optimizer, seen)
            self._loop(model, optimizer, batches, network, self.parts)
            return _results(model, seen)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a strategy may not pay off, or not equal the whole batch
            engine = self._engine(model, optimizer)
        if not any(isinstance(part, OptimizerState) and part.step_in_backward for part in self.plan):
            _watch(optimizer, seen)
        torch.manual_seed(network.seed)
        if self.door in ("step", "retried"):
            for batch in batches:
                engine.step(batch)
            return _results(model, seen)
        loader = [part for batch in batches for part in _parts(batch, self.parts)]
        if self.door in ("fit", "validated"):
            engine.fit(loader, validate=loader if self.door == "validated" else None)
            return _results(model, seen)
        if self.door == "resumed":
            self._through(engine, loader, until=self.parts + 1)
            saved = engine.state_dict()
            model = replace(network, seed=network.seed + 7).build(dtype)  # loading must replace these
            optimizer = self.optimizer(
                [parameter for parameter in model.parameters() if parameter.requires_grad]
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                engine = self._engine(model, optimizer)
            engine.load_state_dict(saved)
            _watch(optimizer, seen)
        self._through(engine, loader)
        return _results(model, seen)

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

    def plain(self, network: Network, dtype: torch.dtype, parts: int | None = None) -> Results:
        """Train with the handwritten loop; ``CLOSE`` compares with the whole batch, ``parts=1``."""
        model, batches = network.build(dtype), network.batches(self.steps, dtype)
        make = self.by_hand or self.optimizer
        optimizer = make(_trained(model))
        seen: list[torch.Tensor] = []
        _watch(optimizer, seen)
        mean_of_means = self.door in ("fit", "validated", "windows", "resumed")
        self._loop(model, optimizer, batches, network, parts or self.parts, mean_of_means)
        return _results(model, seen)

    def _loop(
        self,
        model: nn.Module,
        optimizer: Any,
        batches: list[Any],
        network: Network,
        parts: int,
        mean_of_means: bool = False,
    ) -> None:
        """Train with a handwritten loop that weights each part's mean loss with its share of the batch."""
        torch.manual_seed(network.seed)
        scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0, enabled=self.scaled)
        for number, batch in enumerate(batches):
            pieces = _parts(batch, parts)
            for part in pieces:
                share = len(pieces) if mean_of_means else len(batch[1]) / len(part[1])
                loss = mean_loss(model, part)
                loss = loss * torch.inf if self.scaled and number == 0 else loss
                scaler.scale(loss if share == 1 else loss / share).backward()
            scaler.unscale_(optimizer)
            if self.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


EXACT: dict[str, Combination] = {
    "plain": Combination(),
    "clipped": Combination(clip=0.1),
    "SGD with momentum": Combination(optimizer=Momentum),
    "foreach": Combination((OptimizerState("foreach"),), by_hand=partial(AdamW, foreach=True)),
    "fused": Combination((OptimizerState("fused"),), by_hand=partial(AdamW, fused=True)),
    "accumulation of 2": Combination((Accumulation(parts_per_batch=2),), 2),
    "accumulation of 4, clipped": Combination((Accumulation(parts_per_batch=4),), 4, 0.1),
    "windows of 2": Combination((Accumulation(batches_per_update=2),), 2, door="windows"),
    "windows of 4, clipped": Combination((Accumulation(batches_per_update=4),), 4, 0.1, door="windows"),
    "fit gathering 2": Combination((Accumulation(batches_per_update=2),), 2, door="fit"),
    "fit gathering 3, clipped, checkpointed": Combination(
        (Accumulation(batches_per_update=3), Checkpointing("blocks.*")), 3, 0.1, door="fit"
    ),
    "fit gathering 2, validated": Combination(
        (Accumulation(batches_per_update=2), Checkpointing("blocks.*")), 2, door="validated"
    ),
    "resumed inside a window": Combination((Accumulation(batches_per_update=2),), 2, door="resumed"),
    "retried when memory ran out": Combination((), 2, door="retried"),
    "accumulation, retried": Combination((Accumulation(parts_per_batch=2),), 4, 0.1, door="retried"),
    "checkpointed": Combination((Checkpointing("blocks.*"),)),
    "checkpointed, every other, applied": Combination((Checkpointing("blocks.*", every=2),), door="applied"),
    "checkpointed, reentrant": Combination((Checkpointing("blocks.*", use_reentrant=True),)),
    "tensor by tensor": Combination((Checkpointing(regions=(Region("", recompute="tensors"),)),)),
    "tensor by tensor, products kept, accumulated, clipped, applied": Combination(
        (Checkpointing("blocks.*", recompute="tensors", save_ops=("aten.mm", "aten.addmm", "aten.bmm")),),
        2,
        0.1,
        door="applied",
    ),
    "tensor by tensor, stepped in backward, offloaded": Combination(
        (
            OptimizerState(step_in_backward=True),
            Checkpointing(regions=(Region("", recompute="tensors"),)),
            Offload(min_bytes=0),
        )
    ),
    "offloaded": Combination((Offload(min_bytes=0),)),
    "stepped in backward": Combination((OptimizerState(step_in_backward=True),)),
    "state offloaded": Combination((OptimizerState(offload=True),)),
    "state offloaded, accumulated, clipped, foreach": Combination(
        (Accumulation(parts_per_batch=2), OptimizerState("foreach", offload=True)),
        2,
        0.1,
        by_hand=partial(AdamW, foreach=True),
    ),
    "state offloaded, resumed inside a window": Combination(
        (Accumulation(batches_per_update=2), OptimizerState(offload=True)), 2, door="resumed"
    ),
    "state offloaded, stepped in backward, checkpointed": Combination(
        (OptimizerState(offload=True, step_in_backward=True), Checkpointing("blocks.*"))
    ),
    "stepped in backward, checkpointed, offloaded": Combination(
        (OptimizerState(step_in_backward=True), Checkpointing("blocks.*"), Offload(min_bytes=0))
    ),
    "accumulated, checkpointed, offloaded, clipped, foreach": Combination(
        (
            Accumulation(parts_per_batch=2),
            Checkpointing("blocks.*"),
            Offload(min_bytes=0),
            OptimizerState("foreach"),
        ),
        2,
        0.1,
        by_hand=partial(AdamW, foreach=True),
    ),
    "the same, windows, resumed": Combination(
        (Accumulation(batches_per_update=2), Checkpointing("blocks.*"), Offload(min_bytes=0)),
        2,
        0.1,
        door="resumed",
    ),
    "the same, retried": Combination(
        (Accumulation(parts_per_batch=2), Checkpointing("blocks.*"), Offload(min_bytes=0)),
        4,
        0.1,
        door="retried",
    ),
}
OneStep = partial(Combination, optimizer=Momentum, steps=1)
CLOSE: dict[str, Combination] = {
    "accumulation of 2 = whole batch": OneStep((Accumulation(parts_per_batch=2),)),
    "accumulation of 4 = whole batch": OneStep((Accumulation(parts_per_batch=4),)),
    "of 3, clipped = whole batch": OneStep((Accumulation(parts_per_batch=3),), clip=0.1),
    "of single samples = whole batch": OneStep((Accumulation(micro_batch_size=1),)),
    "retried = whole batch": OneStep((), door="retried"),
    "4 slices, in any loop = whole batch": OneStep((BatchSlices(4),), door="applied"),
    "3 slices, 2 kept, clipped = whole batch": OneStep((BatchSlices(3, kept=2),), clip=0.1, door="applied"),
    "2 slices, checkpointed = whole batch": OneStep(
        (BatchSlices(2), Checkpointing("blocks.*"), Offload(min_bytes=0)), door="applied"
    ),
    "3 slices, scaled losses, overflow = whole batch": OneStep(
        (BatchSlices(3),), clip=0.1, scaled=True, steps=2, door="applied"
    ),
    "2 slices, accumulation of 2 = whole batch": OneStep((BatchSlices(2), Accumulation(parts_per_batch=2))),
    "checkpointed, of 2, retried = whole batch": OneStep(
        (Accumulation(parts_per_batch=2), Checkpointing("blocks.*")), door="retried"
    ),
}


def differing(name: str, network: Network, dtype: torch.dtype = torch.float32) -> list[str]:
    """Return which of gradients, parameters and buffers differ in any bit from the handwritten loop's."""
    return _unequal(EXACT[name].ours(network, dtype), EXACT[name].plain(network, dtype))


def is_reproducible(name: str, network: Network, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether two runs of the handwritten loop agree in every bit. Some kernels of a GPU do not."""
    return not _unequal(EXACT[name].plain(network, dtype), EXACT[name].plain(network, dtype))


def _unequal(ours: Results, plain: Results) -> list[str]:
    pairs = {"parameters": (ours.parameters, plain.parameters), "buffers": (ours.buffers, plain.buffers)}
    if ours.gradients:
        known = len(ours.gradients)  # only of the steps after resuming
        pairs["gradients"] = (ours.gradients, plain.gradients[-known:])
    return [
        what
        for what, (left, right) in pairs.items()
        if len(left) != len(right) or not all(map(torch.equal, left, right))
    ]


def error(name: str, network: Network, dtype: torch.dtype) -> float:
    """Return the relative error against the whole batch: the larger of those of gradients and parameters.

    Only divisible networks promise a small one.
    """
    ours, plain = CLOSE[name].ours(network, dtype), CLOSE[name].plain(network, dtype, parts=1)
    return max(_error(ours.gradients, plain.gradients), _error(ours.parameters, plain.parameters))


def error_of_ranks(pool: Any, network: Network, dtype: torch.dtype) -> float:
    """Return the same error for ranks under DDP, which divide their parts of the batch in two slices.

    Args:
        pool: of ranks.
        network: a divisible one.
        dtype: of its parameters.
    """
    plain = OneStep().plain(network, dtype)
    found = pool.run("train_as_rank", network, dtype, module="support.strategy_mixes")
    return max(
        max(_error(ours.gradients, plain.gradients), _error(ours.parameters, plain.parameters))
        for ours in found
    )


def train_as_rank(rank: int, ranks: int, network: Network, dtype: torch.dtype) -> Results:
    """Train a step with this rank's part of the batch."""
    model, (batch,) = network.build(dtype), network.batches(1, dtype)
    apply(model, BatchSlices(2))
    distributed = nn.parallel.DistributedDataParallel(model)
    optimizer = Momentum(_trained(model))
    seen: list[torch.Tensor] = []
    _watch(optimizer, seen)
    part = _parts(batch, ranks)[rank]
    share = ranks * len(part[1]) / len(batch[1])  # DDP takes the mean of ranks
    (mean_loss(distributed, part) * share).backward()
    optimizer.step()
    return _results(model, seen)


def _error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    assert len(found) == len(wanted)
    off = sum(
        (left.double() - right.double()).square().sum() for left, right in zip(found, wanted, strict=True)
    )
    size = sum(right.double().square().sum() for right in wanted)
    return float((off / size).sqrt())


def _parts(batch: Any, parts: int) -> list[Any]:
    sizes = even_micro_batch_sizes(len(batch[1]), parts)
    return list(zip(batch[0].split(sizes), batch[1].split(sizes), strict=True))


def _short_of_memory() -> Callable[..., Any]:
    """Return a loss function that runs out of memory in its first call, after the forward."""
    calls = [0]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls[0] += 1
        mean = mean_loss(model, batch)
        if calls[0] == 1:
            raise torch.OutOfMemoryError("by hand")
        return mean

    return loss


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _watch(optimizer: Any, seen: list[torch.Tensor]) -> None:
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(
            parameter.grad.clone()
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        )
    )


def _results(model: nn.Module, seen: list[torch.Tensor]) -> Results:
    return Results(seen, [parameter.detach().clone() for parameter in model.parameters()], [*model.buffers()])
