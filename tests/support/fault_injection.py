"""Inject a fault before any one operation of a training step, and check what the engine does about it.

    engine.step:  forward ─ backward ─ unscale ─ clip ─ optimizer ─ scheduler
    operation     0 1 2 ...      ^ a fault here                                  repeated for every operation

Only three outcomes are allowed: the engine repeats the step in smaller parts; the engine reports the failure
and leaves no trace of the step; or the update is torn and the engine raises TornUpdateError.
"""

import copy
import linecache
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

import memfit.train
from memfit.errors import TornUpdateError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.mechanisms.optimizer_step import replace_optimizer_step, unwrapped_optimizer_step
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.precision import LossScale, Precision
from memfit.train.batches_by_window import WindowBatches, gather_batches_by_window
from memfit.train.engine import Engine
from support.late_stream import late_state_copies

BATCHES = 8
TRAIN = str(Path(memfit.train.__file__).parent)


class Fault(TorchDispatchMode):
    """Count operations, and raise once, before one of them.

    Args:
        at: index of the operation, counted from where the mode is entered; None: only count.
        error: the exception to raise.
    """

    def __init__(self, at: int | None, error: type[BaseException] = torch.OutOfMemoryError) -> None:
        super().__init__()
        self.at, self.error, self.count = at, error, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "profiler":  # marks, which allocate nothing
            return function(*args, **(kwargs or {}))
        self.count += 1
        if self.count - 1 == self.at:
            raise self.error("an injected fault")
        return function(*args, **(kwargs or {}))


class Interrupt:
    """Count executed lines of the engine's own code, and raise KeyboardInterrupt once, before one of them.

    Args:
        at: index of the line, counted from where this is entered; None: only count.
    """

    def __init__(self, at: int | None) -> None:
        self.at, self.count = at, 0

    def __enter__(self) -> Self:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(TRAIN) else None

    def _line(self, frame, event, argument):
        code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        # Python skips __exit__ if an exception arrives between the end of a with block and the call of
        # __exit__. That gap is Python's, not the engine's.
        if event == "line" and not code.startswith("with "):
            self.count += 1
            if self.count - 1 == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def _logits(model, x):
    return model(x.to(next(model.parameters()).dtype)).float()


def mean_loss(model, batch):
    return F.cross_entropy(_logits(model, batch[0]), batch[1])


def _sum(model, batch):
    """Return a summed loss and its weight; labels of 2 are ignored, like padding."""
    x, y = batch
    loss = F.cross_entropy(_logits(model, x), y, reduction="sum", ignore_index=2)
    return loss, max(1, int((y != 2).sum()))


def _mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def _noisy():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def _adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=0.05, **options)


def _momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _tensor_rate(model):
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05), foreach=False)


def _decay(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


FP16 = Precision("fp16", loss_scale=LossScale(init_scale=64.0, growth_interval=2))
FP16_MASTERS = Precision("fp16", autocast=False, master_weights=True, loss_scale=FP16.loss_scale)
MASTERS = Precision("bf16", autocast=False, master_weights=True)
CASES: dict[str, dict[str, Any]] = {
    "AdamW, clipped": {"max_grad_norm": 0.1},
    "SGD with momentum, scheduler": {"optimizer": _momentum, "scheduler": _decay},
    "a learning rate that is a tensor": {"optimizer": _tensor_rate, "scheduler": _decay},
    "fp16 with a loss scale, clipped": {"precision": FP16, "max_grad_norm": 0.1},
    "bf16 with float32 masters": {"precision": MASTERS},
    "fp16 with float32 masters, scheduler": {"precision": FP16_MASTERS, "scheduler": _decay},
    "accumulation, uneven": {"steps": 2, "size": 7},
    "batches gathered": {"gathered": 2, "size": 7},
    "batches gathered, in a window of the last epoch": {"gathered": 3, "carried": 1, "model": _noisy},
    "gathered sums of bf16": {"gathered": 3, "carried": 1, "precision": Precision("bf16", autocast=False)},
    "accumulation of sums of bf16": {"steps": 2, "precision": Precision("bf16", autocast=False)},
    "losses weighted by labels": {"steps": 2, "loss": _sum},
    "AdamW, stepped in backward": {"optimizer_state": OptimizerState(step_in_backward=True)},
    "AdamW, its state offloaded": {"optimizer_state": OptimizerState(offload=True)},
    "AdamW, its state offloaded, stepped in backward": {
        "optimizer_state": OptimizerState(offload=True, step_in_backward=True)
    },
    "fp16 with float32 masters, offloaded with their state": {
        "precision": FP16_MASTERS,
        "optimizer_state": OptimizerState(offload=True),
    },
    "batch norm and dropout": {"model": _noisy},
}


def batches(size: int = 8, device: str = "cpu") -> list[Any]:
    """Return a few batches of the same size."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 5, generator=generator).to(device),
            torch.randint(3, (size,), generator=generator).to(device),
        )
        for _ in range(BATCHES)
    ]


def build(
    case: str, *, protect: str = "always", device: str = "cpu", by_hand: bool = False
) -> tuple[Engine, list[Any]]:
    """Return the engine and the batches of a case; with ``by_hand`` for a loop that gathers them itself."""
    given = CASES[case]
    torch.manual_seed(0)
    model = given.get("model", _mlp)().to(device)
    steps = given.get("steps", 1)
    gathered = given.get("gathered", steps if by_hand else 1)
    plan: list[Any] = []
    if gathered > 1:
        plan += [Accumulation(batches_per_update=gathered, remainder="carry")]
    elif steps > 1:
        plan += [Accumulation(parts_per_batch=steps)]
    plan += [given[name] for name in ("precision", "optimizer_state") if name in given]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*BatchNorm layers")
        engine = Engine(
            model,
            plan,
            optimizer=given.get("optimizer", _adamw)(model),
            loss=given.get("loss", mean_loss),
            scheduler=given.get("scheduler"),
            scheduler_interval="update" if "scheduler" in given else None,
            max_grad_norm=given.get("max_grad_norm"),
            protect=protect,
        )
    return engine, batches(given.get("size", 8), device)


def picture(engine: Engine) -> dict[str, Any]:
    """Return all that an update changes: the saved state, which gradients exist, and the parameters."""
    state = copy.deepcopy(engine.state_dict())
    del state["finer"]  # the engine keeps the finer split that a fault led to
    parameters = list(engine.model.parameters())
    return state | {
        "parameters": [parameter.detach().clone() for parameter in parameters],
        "left": [parameter.grad is not None for parameter in parameters],
    }


def same(left: Any, right: Any) -> bool:
    """Return whether two pictures are equal, bit for bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Return the entries in which two pictures differ."""
    return [key for key in left if not same(left[key], right[key])]


FAULTS: dict[str, tuple[Callable[[int | None], Any], type[BaseException]]] = {
    "memory runs out at an operation": (Fault, torch.OutOfMemoryError),
    "Ctrl-C at an operation": (lambda at: Fault(at, KeyboardInterrupt), KeyboardInterrupt),
    "Ctrl-C at a line of the engine's": (Interrupt, KeyboardInterrupt),
}


def call_before_update(engine: Engine, callback: Callable[[], None]) -> None:
    """Have the engine call ``callback`` before it updates parameters."""
    in_backward, offloaded = engine._ledger.update.in_backward, engine._ledger.update.offloaded
    if in_backward is None and offloaded is None:
        engine.optimizer.register_step_pre_hook(lambda *_: callback())
        return
    if in_backward is None:  # it may refuse hooks
        step = unwrapped_optimizer_step(engine.optimizer)
        replace_optimizer_step(engine.optimizer, lambda: (callback(), step()))
        return

    class Watched(set[torch.Tensor]):
        def add(self, parameter: torch.Tensor) -> None:
            callback()
            super().add(parameter)

    in_backward.stepped = Watched()


def updates(engine: Engine, data: list[Any], carried: int) -> Iterator[Any]:
    """Return what each update is made of: a batch, or a group of batches after some of an earlier epoch."""
    settings = engine.plan.accumulation
    if settings is None or not settings.gathers:
        return engine.through(data)
    for group in gather_batches_by_window(engine._ledger, settings, data[:carried]):
        engine._full_batch.gather(group.window, group.left, closes=False)
    return gather_batches_by_window(engine._ledger, settings, data[carried:])


def update(engine: Engine, batches: Any) -> Any:
    """Make one update from what ``updates`` yields."""
    if isinstance(batches, WindowBatches):
        return engine._full_batch.gather(batches.window, batches.left, closes=True)
    return engine.step(batches)


class Sweep:
    """Inject faults before the operations of one step of a case.

    Args:
        case: a key of ``CASES``.
        step: index of the step; step 0 creates the optimizer's state.
        fault: a key of ``FAULTS``.
        protect: as in ``Engine``.
    """

    @late_state_copies()
    def __init__(self, case: str, step: int, fault: str, protect: str = "always") -> None:
        self._case, self._step, self._protect = case, step, protect
        self._fault, self._error = FAULTS[fault]
        engine, data, batch = self._begin()
        update_starts: list[int] = []
        with self._fault(None) as counter:
            call_before_update(engine, lambda: update_starts.append(counter.count))
            update(engine, batch)
        self.places, self.update = counter.count, update_starts[0]
        """Number of operations (or lines), and the index of the first at which parameters change."""
        self._after = picture(engine)
        data.close()
        self._in_parts = None
        if engine._ledger.update.in_backward is None:  # a step in backward cannot be split
            engine, data, batch = self._begin(finer=2)
            update(engine, batch)
            self._in_parts = picture(engine)
            data.close()

    def _begin(self, finer: int = 1) -> tuple[Engine, Any, Any]:
        """Return an engine before the step, its data, and the step's batch."""
        engine, data = build(self._case, protect=self._protect)
        walk = updates(engine, data, CASES[self._case].get("carried", 0))
        for _ in range(self._step):
            update(engine, next(walk))
        if finer > 1:  # split only this step; a plan that accumulates would split the earlier ones too
            engine._full_batch.finer = finer
        return engine, walk, next(walk)

    @late_state_copies()
    def outcome(self, at: int) -> str:
        """Run the step with a fault before one operation; return the outcome.

        Raises:
            AssertionError: the fault did harm that the engine did not report.
        """
        engine, data, batch = self._begin()
        before = picture(engine)
        try:
            with self._fault(at):
                result = update(engine, batch)
        except TornUpdateError:
            assert self._error is torch.OutOfMemoryError
            return self._torn(engine, batch, at)
        except self._error:
            if engine._ledger.update.torn:
                assert self._error is not torch.OutOfMemoryError
                return self._torn(engine, batch, at)
            if self._fault is Interrupt and not differing(picture(engine), self._after):
                return "made, and interrupted afterwards"
            assert not differing(picture(engine), before)
            update(engine, batch)
            assert not differing(picture(engine), self._after)
            return "reported"
        finally:
            data.close()
        assert self._error is torch.OutOfMemoryError
        assert result.retried == 1
        assert at < self.update
        assert self._in_parts is not None
        assert not differing(picture(engine), self._in_parts)
        return "recovered"

    def _torn(self, engine: Engine, batch: Any, at: int) -> str:
        if self._fault is not Interrupt:  # an Interrupt may also hit just before the update or its accounting
            assert self._protect != "always"
            assert at >= self.update
        for refused in (engine.state_dict, lambda: update(engine, batch)):
            with pytest.raises(TornUpdateError, match="was interrupted"):
                refused()
        return "torn, and says so"
