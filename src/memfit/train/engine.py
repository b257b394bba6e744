"""The engine: who divides, scales, clips, steps and counts, so that nobody else has to.

    window:  micro-batch ── forward ── backward ┐
             micro-batch ── forward ── backward ├─> correct -> unscale -> clip -> step -> scheduler -> count
             micro-batch ── forward ── backward ┘   once       once       once    if all is finite

Two doors lead in. ``step(batch)`` splits a batch itself, and finer when memory runs out. ``windows(loader)``
serves a loop of one's own.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.precision import DTYPES, Precision
from memfit.train import state
from memfit.train.gradients import GradientSums
from memfit.train.position import Position
from memfit.train.result import StepResult
from memfit.train.retry import Moment, out_of_memory
from memfit.train.scaler import Scaler
from memfit.train.split import batch_size, even_sizes, split
from memfit.train.window import Window

Loss = Callable[[nn.Module, Any], torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]]


class Engine:
    """Trains a model with less memory, and with the same result.

    Args:
        model: whose parameters the optimizer updates.
        optimizer: any of PyTorch's, or alike.
        loss: for ``step``: ``loss(model, batch)`` returns the mean over a batch, or (sum, weight).
        accumulation: how batches are divided.
        precision: what runs in less than float32.
        scheduler: of the learning rate; it moves when the optimizer does.
        max_grad_norm: gradients of a window are clipped to it, once.
        size: ``size(batch)`` returns its samples, where a batch is of a kind of its own.
        split: ``split(batch, sizes)`` returns its parts, there.
        retry: begin a batch again in smaller parts when memory runs out.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> engine = Engine(
        ...     model,
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     loss=lambda model, batch: model(batch).square().mean(),
        ...     accumulation=Accumulation(gradient_accumulation_steps=4),
        ... )
        >>> engine.step(torch.ones(32, 4)).updated
        True
    """

    def __init__(  # noqa: PLR0913 - each is one choice of the user's
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Loss | None = None,
        accumulation: Accumulation | None = None,
        precision: Precision | None = None,
        scheduler: Any = None,
        max_grad_norm: float | None = None,
        size: Callable[[Any], int] = batch_size,
        split: Callable[[Any, list[int]], list[Any]] = split,
        retry: bool = True,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.accumulation = accumulation or Accumulation(gradient_accumulation_steps=1)
        self.precision = precision or Precision("fp32")
        self.micro_step = 0
        """Micro-batches so far."""
        self.optimizer_step = 0
        """Updates so far."""
        self._loss, self._size, self._split = loss, size, split
        self._retry, self._max_grad_norm = retry, max_grad_norm
        self._steps = self.accumulation.gradient_accumulation_steps or 1
        self._device = next(model.parameters()).device.type
        self._scaler = Scaler(self.precision.loss_scale, self._device)
        self._position = Position()
        self._window: Window | None = None
        self._resumed: Window | None = None
        self._sums = self._gradient_sums()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward: ``step`` enters it itself."""
        if not self.precision.autocast or self.precision.dtype == "fp32":
            return nullcontext()
        return torch.autocast(self._device, dtype=getattr(torch, DTYPES[self.precision.dtype]))

    # ---- The first door: whole batches ---------------------------------------------------------------

    def step(self, batch: Any) -> StepResult:
        """Make one update from a batch.

        Args:
            batch: tensors, and tuples, lists and dicts of them; ``split`` says how it is divided.

        Raises:
            UsageError: there is no loss, or a window is open.
            torch.OutOfMemoryError: not even single samples fit: parameters, buffers and random numbers are as
                they were. From the optimizer's step it comes as it is: some parameters may be updated.
        """
        if self._loss is None:
            raise UsageError("engine.step needs to know the loss: Engine(model, optimizer, loss=...).")
        self._expect_closed()
        samples, begun, retried = self._size(batch), self.micro_step, 0
        sizes = self._sizes(samples)
        moment = Moment.of(self.model) if self._retry else None
        while self._ran_out_of_memory(self._loss, batch, sizes, moment):
            self.micro_step = begun
            sizes = even_sizes(samples, 2 * len(sizes))
            retried += 1
        return self._update(retried)

    def _sizes(self, samples: int) -> list[int]:
        micro = self.accumulation.micro_batch_size
        if micro is None:
            return even_sizes(samples, self._steps)
        rest = samples % micro
        return [micro] * (samples // micro) + [rest] * (rest > 0)

    def _ran_out_of_memory(self, loss: Loss, batch: Any, sizes: list[int], moment: Moment | None) -> bool:
        """Go forward and backward through the parts of a batch; say whether it is to be done in smaller ones.

        When this returns, the exception is gone, and all that its frames held.
        """
        try:
            self._go_through(loss, batch, sizes)
        except BaseException as error:
            self._drop_window()
            if moment is not None:
                moment.restore()
                if out_of_memory(error) and max(sizes) > 1:
                    return True
            raise
        return False

    def _go_through(self, loss_of: Loss, batch: Any, sizes: list[int]) -> None:
        self._window = window = Window(len(sizes))
        for part, size in zip(self._split(batch, sizes), sizes, strict=True):
            with self.autocast():
                loss = loss_of(self.model, part)
            if isinstance(loss, tuple):
                weight = float(loss[1])
                self._backward(loss[0] / weight, weight)
            else:
                window.total = float(sum(sizes))
                self._backward(loss, float(size))

    # ---- The second door: a loop of one's own --------------------------------------------------------

    def windows(self, loader: Iterable[Any]) -> Iterator["Micros"]:
        """Return the windows of one pass over the data; each gives its micro-batches.

        A window's micro-batches are fetched before its first is handed out, so that the last one, which may
        be shorter, is divided by what it has. After ``load_state_dict`` the first call goes on where the
        state was saved: give it the same data.
        """
        for group in self._position.groups(loader, self._steps, self.accumulation.partial_window):
            self._expect_closed()
            self._window, self._resumed = self._resumed or Window(len(group)), None
            yield Micros(self, self._window, group)
            self._expect_closed()

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> StepResult | None:
        """Go backward from a micro-batch's loss.

        Args:
            loss: its mean.
            weight: what the mean is over (tokens, samples), if micro-batches differ; all of a window or none.

        Returns:
            What became of the window, if it is one that ``windows`` did not open and this filled it.
        """
        if self._window is None:
            self._window = Window(self._steps, by_hand=True)
        self._backward(loss, weight)
        full = self._window.by_hand and self._window.done == self._window.planned
        return self._update() if full else None

    def flush(self) -> StepResult | None:
        """Close an open window with the micro-batches that it has; None if there are none."""
        if self._window is None or not self._window.done:
            self._window = None
            return None
        return self._update()

    def _backward(self, loss: torch.Tensor, weight: float | None) -> None:
        if self._window is None:
            raise AssertionError("a backward belongs to a window")
        self._scaler.scaled(self._window.add(loss, weight)).backward()  # type: ignore[no-untyped-call]
        self.micro_step += 1

    # ---- The end of a window -------------------------------------------------------------------------

    def _update(self, retried: int = 0) -> StepResult:
        window, scale = self._window, self._scaler.scale
        if window is None:
            raise AssertionError("an update belongs to a window")
        loss = window.mean_loss()
        if self._sums is not None:
            self._sums.put_back(window.correction)
        elif window.correction != 1.0:
            torch._foreach_mul_(self._gradients(), window.correction)
        found_inf = self._scaler.unscale(self.optimizer)
        norm = None
        if self._max_grad_norm is not None and not found_inf:
            norm = nn.utils.clip_grad_norm_(self._with_gradients(), self._max_grad_norm)
        self._scaler.step(self.optimizer)
        self._drop_window()
        if not found_inf:
            self.optimizer_step += 1
            if self.scheduler is not None:
                self.scheduler.step()
        return StepResult(
            not found_inf, found_inf, scale, self.micro_step, self.optimizer_step, retried, loss, norm
        )

    def _with_gradients(self) -> list[torch.Tensor]:
        groups = (group["params"] for group in self.optimizer.param_groups)
        return [parameter for group in groups for parameter in group if parameter.grad is not None]

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._with_gradients() if parameter.grad is not None]

    def _drop_window(self) -> None:
        self._window = None
        self.optimizer.zero_grad(set_to_none=True)
        if self._sums is not None:
            self._sums.clear()

    def _expect_closed(self) -> None:
        if self._window is not None:
            raise UsageError(
                f"A window is open, with {self._window.done} of {self._window.planned} micro-batches: "
                "give each a backward, or close it with engine.flush()."
            )

    def _gradient_sums(self) -> GradientSums | None:
        """Sum gradients in another dtype, where parameters are of low precision and there are several."""
        chosen = self.accumulation.gradient_dtype
        several = self._steps > 1 or self.accumulation.micro_batch_size is not None
        dtype = getattr(torch, chosen or "float32")
        low = [
            parameter
            for parameter in self.model.parameters()
            if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype != dtype
        ]
        wanted = [parameter for parameter in low if chosen or parameter.dtype.itemsize < dtype.itemsize]
        return GradientSums(wanted, dtype) if wanted and several else None

    # ---- Saving and resuming -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that a run needs to go on bit for bit, inside a window too: tensors and plain values."""
        window = self._window
        return {
            "micro_step": self.micro_step,
            "optimizer_step": self.optimizer_step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": self._scaler.state_dict(),
            "position": self._position.state_dict(),
            "random": state.random_state(),
            "window": None if window is None else window.state_dict(),
            "gradients": {
                name: self._gradient(parameter)
                for name, parameter in self.model.named_parameters()
                if window is not None and self._gradient(parameter) is not None
            },
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a state; the next ``windows`` begins inside its epoch."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.scheduler is not None and saved["scheduler"] is not None:
            self.scheduler.load_state_dict(saved["scheduler"])
        self._scaler.load_state_dict(saved["scaler"])
        self._drop_window()
        self.micro_step, self.optimizer_step = saved["micro_step"], saved["optimizer_step"]
        self._position.load_state_dict(saved["position"], saved["random"])
        window = Window(**saved["window"]) if saved["window"] is not None else None
        inside = bool(saved["position"])
        self._resumed, self._window = (window, None) if inside else (None, window)
        parameters = dict(self.model.named_parameters())
        for name, gradient in saved["gradients"].items():
            self._set_gradient(parameters[name], gradient.to(parameters[name].device))
        state.set_random_state(saved["random"])

    def save(self, path: str | Path) -> None:
        """Write the state to a file: the whole of it or nothing."""
        state.save(self.state_dict(), Path(path))

    def load(self, path: str | Path) -> None:
        """Go on from a file that ``save`` wrote.

        Raises:
            FileFormatError: it is something else, or damaged.
        """
        self.load_state_dict(state.load(Path(path)))

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        summed = self._sums.of(parameter) if self._sums is not None else None
        return parameter.grad if summed is None else summed

    def _set_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        if self._sums is None or gradient.dtype == parameter.dtype:
            parameter.grad = gradient
        else:
            self._sums.set(parameter, gradient)


class Micros:
    """The micro-batches of one window; each is to go backward once."""

    def __init__(self, engine: Engine, window: Window, items: list[Any]) -> None:
        self._engine, self._window, self._items = engine, window, items
        self.result: StepResult | None = None
        """What became of the window, once all went backward."""

    def __len__(self) -> int:
        """Return how many there are, with those that went backward before a state was saved."""
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        """Hand out the micro-batches; after the last one, update."""
        for item in self._items[self._window.done :]:
            done = self._window.done
            yield item
            if self._window.done != done + 1:
                raise UsageError(
                    "A micro-batch was handed out and engine.backward was not called for it once."
                )
        self.result = self._engine.flush()
