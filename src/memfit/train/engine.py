"""The engine: who divides, scales, clips, steps and counts, so that nobody else has to.

    window:  micro-batch ── forward ── backward ┐
             micro-batch ── forward ── backward ├─> update.py: correct -> unscale -> clip -> step -> scheduler
             micro-batch ── forward ── backward ┘              once       once      once    if all is finite

Three doors lead in. ``fit`` trains for epochs. ``step(batch)`` splits a batch itself, and finer when memory
runs out. ``windows(loader)`` serves a loop of one's own.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from memfit.errors import TornUpdateError, UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.apply import apply_to_model
from memfit.strategies.configuration import Configuration
from memfit.strategies.precision import Precision
from memfit.train import masters, resume, state
from memfit.train.callbacks import Callback, Saving
from memfit.train.gradients import gradient_sums
from memfit.train.graphs import Graphs, graphs
from memfit.train.job import Job, Loss
from memfit.train.position import Position
from memfit.train.result import StepResult
from memfit.train.retry import Moment, out_of_memory
from memfit.train.scaler import Scaler
from memfit.train.split import batch_size, even_sizes, split
from memfit.train.update import INTERRUPTED, Protect, Update
from memfit.train.window import Window


class Engine:
    """Trains a model with less memory, and with the same result.

    Args:
        job: a ``Job``, or a model; then ``optimizer`` and what else is wanted of a job's parts are given by
            name.
        plan: a ``Plan``, settings of strategies, or a list of them: they are applied to the model. Or what
            ``configure`` reads, or has read.
        optimizer, loss, scheduler, max_grad_norm: as in ``Job``.
        callbacks: told of what happens.
        size: ``size(batch)`` returns its samples, where a batch is of a kind of its own.
        split: ``split(batch, sizes)`` returns its parts, there.
        cuda_graphs: work by two CUDA graphs, one that accumulates and one that updates: for models whose
            kernels take less time than asking for them.
        retry: begin a batch again in smaller parts when memory runs out; later ones are split alike. Without
            it buffers and random numbers are not noted, and stay as a step that fails leaves them.
        protect: when parameters and optimizer state are copied to the host before an update, so that memory
            that runs out inside it does no harm: ``"always"``, ``"never"``, or ``"auto"``, the first time and
            whenever the allocator had to give back its cache.

    Raises:
        UsageError: parts are missing, or the plan does not suit them.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> engine = Engine(
        ...     model,
        ...     Accumulation(gradient_accumulation_steps=4),
        ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     loss=lambda model, batch: model(batch).square().mean(),
        ... )
        >>> engine.step(torch.ones(32, 4)).updated
        True
    """

    def __init__(  # noqa: PLR0913 - each is one choice of the user's
        self,
        job: Job | nn.Module,
        plan: Any = None,
        *,
        optimizer: Any = None,
        loss: Loss | None = None,
        scheduler: Any = None,
        max_grad_norm: float | None = None,
        callbacks: Iterable[Callback] = (),
        size: Callable[[Any], int] = batch_size,
        split: Callable[[Any, list[int]], list[Any]] = split,
        cuda_graphs: bool = False,
        retry: bool = True,
        protect: Protect = "auto",
    ) -> None:
        if isinstance(job, nn.Module):
            if optimizer is None:
                raise UsageError("Engine(model, plan) needs an optimizer beside the model: optimizer=...")
            job = Job(job, optimizer, loss, scheduler, max_grad_norm)
        elif any(part is not None for part in (optimizer, loss, scheduler, max_grad_norm)):
            raise UsageError(
                "Engine(job, plan): the job has its own optimizer, loss, scheduler and max_grad_norm."
            )
        self.model = model = job.model
        configuration = Configuration.of(plan)
        self.plan = plan = configuration.plan
        self.accumulation = plan.accumulation or Accumulation(gradient_accumulation_steps=1)
        self.precision = plan.precision or Precision("fp32")
        self.micro_step = 0
        """Micro-batches so far."""
        self.optimizer_step = 0
        """Updates so far."""
        self.epoch = 0
        """Passes of ``fit`` over the data so far."""
        self.callbacks = tuple(sorted(callbacks, key=lambda callback: isinstance(callback, Saving)))
        self._loss, self._size, self._split, self._retry = job.loss, size, split, retry
        self._steps = self.accumulation.gradient_accumulation_steps or 1
        self._device = next(model.parameters()).device.type
        self._masters = masters.copies(model.parameters()) if self.precision.master_weights else {}
        apply_to_model(model, plan)
        made = job.optimizer
        self.optimizer = made if isinstance(made, torch.optim.Optimizer) else made(model.parameters())
        if plan.optimizer_state is not None:
            plan.optimizer_state.optimizer(self.optimizer, model)
        masters.hand_over(self.optimizer, self._masters)
        made = job.scheduler
        self.scheduler = made(self.optimizer) if callable(made) else made
        self._scaler = Scaler(self.precision.loss_scale, self._device)
        self._sums = gradient_sums(model, self.accumulation, self._masters)
        self._graphs = self._make_graphs() if cuda_graphs else None
        self._update = Update(
            self.optimizer,
            self.scheduler,
            self._scaler,
            self._sums,
            self._masters,
            max_grad_norm=configuration.clipped_to(job.max_grad_norm),
            protect=protect,
            graphs=self._graphs,
            in_backward=plan.optimizer_state is not None and plan.optimizer_state.step_in_backward,
        )
        self._position = Position()
        self._window: Window | None = None
        self._before = 0  # micro-steps, when it was opened
        self._resumed: Window | None = None
        self._finer = 1
        self._stopped = False
        self.epochs = 0
        """How many ``fit`` is to make in all."""
        self.batches: int | None = None
        """How many an epoch of ``fit`` has, if its loader knows."""
        self._warn_of_batch_norms()

    def _make_graphs(self) -> Graphs:
        state = self.plan.optimizer_state
        for there, what in (
            (self.precision.loss_scale, "fp16: the host reads whether a step is applied; choose bf16"),
            (self._sums, "gradients that are summed in another dtype, as master weights need"),
            (state and state.step_in_backward, "step_in_backward"),
        ):
            if there:
                raise UsageError(f"cuda_graphs cannot be with {what}.")
        return graphs(self.optimizer)

    def _warn_of_batch_norms(self) -> None:
        if not self.accumulation.several:
            return
        names = [
            name
            for name, module in self.model.named_modules()
            if isinstance(module, _BatchNorm) and module.training
        ]
        if names:
            warnings.warn(
                f"{len(names)} batch norms ({names[0]}, ...) will see micro-batches, so that accumulation "
                "does not equal the whole batch. Alternatives: GroupNorm or LayerNorm, frozen statistics "
                "(module.eval()), or SyncBatchNorm on several GPUs.",
                stacklevel=3,
            )

    @property
    def notes(self) -> list[str]:
        """What the plan's strategies cost this model, and where they do not pay."""
        return [
            note
            for strategy in self.plan.strategies()
            if hasattr(strategy, "notes")
            for note in strategy.notes(self.model)
        ]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward and its loss: ``step`` enters it itself."""
        return self.precision.context(self._device)

    def __enter__(self) -> Self:
        """Have the end of the block check that no window was left open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Complain about an open window, unless something else went wrong."""
        if kind is None:
            self._expect_closed()

    # ---- Epochs --------------------------------------------------------------------------------------

    def fit(self, loader: Iterable[Any], epochs: int = 1) -> StepResult | None:
        """Train until so many epochs are done in all, a batch to an optimizer step.

        Args:
            loader: a ``DataLoader``, or whatever can be gone through once an epoch.
            epochs: in all: a run that went on from a saved state makes those that are left.

        Returns:
            What the last batch became; None if there was none.
        """
        result = None
        self.epochs = epochs
        self.batches = len(loader) if isinstance(loader, Sized) else None
        self._stopped = False
        self._tell("on_fit_begin")
        try:
            while self.epoch < epochs and not self._stopped:
                self._tell("on_epoch_begin")
                for batch in self.through(loader):
                    result = self.step(batch)
                    if self._stopped:
                        return result
                self.epoch += 1
                self._tell("on_epoch_end")
        finally:
            self._tell("on_fit_end")
        return result

    def stop(self) -> None:
        """Have ``fit`` end after the batch that it is at."""
        self._stopped = True

    def through(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Return the batches of one pass over the data, for ``step``: a resumed run goes on where it was.

        After ``load_state_dict`` the first call begins where the state was saved: give it the same data.
        """
        for (batch,) in self._position.groups(loader, 1, "flush"):
            yield batch

    @property
    def batch(self) -> int:
        """Batches, or micro-batches, of this pass over the data that are done."""
        return self._position.consumed

    # ---- Whole batches -------------------------------------------------------------------------------

    def step(self, batch: Any) -> StepResult:
        """Make one update from a batch.

        Args:
            batch: tensors, and tuples, lists and dicts of them; ``split`` says how it is divided.

        Raises:
            UsageError: there is no loss, or a window is open.
            torch.OutOfMemoryError: not even single samples fit, or the update does not: parameters, buffers,
                optimizer state and random numbers are as they were.
            TornUpdateError: memory ran out inside the optimizer's step, and nothing was copied before.
        """
        if self._loss is None:
            raise UsageError(
                "engine.step needs to know the loss: Engine(model, plan, optimizer=..., loss=...)."
            )
        self._expect_closed()
        with self._graphs.window() if self._graphs is not None else nullcontext():
            return self._step(self._loss, batch)

    def _step(self, loss: Loss, batch: Any) -> StepResult:
        samples, retried = self._size(batch), 0
        sizes = self._sizes(samples, self._finer)
        moment = Moment.of(self.model) if self._retry else None
        try:
            while self._ran_out_of_memory(loss, batch, sizes, moment):
                retried += 1
                sizes = self._sizes(samples, self._finer << retried)
                self._tell("on_retry", len(sizes))
            self._finer <<= retried
            return self._close(retried)
        except BaseException:
            if self._window is not None:
                self._give_up(moment)
            raise

    def _sizes(self, samples: int, finer: int) -> list[int]:
        micro = self.accumulation.micro_batch_size
        if micro is None:
            return even_sizes(samples, self._steps * finer)
        micro = max(1, micro // finer)
        rest = samples % micro
        return [micro] * (samples // micro) + [rest] * (rest > 0)

    def _ran_out_of_memory(self, loss: Loss, batch: Any, sizes: list[int], moment: Moment | None) -> bool:
        """Go forward and backward through the parts of a batch; say whether it is to be done in smaller ones.

        When this returns, the exception is gone, and all that its frames held.
        """
        try:
            self._go_through(loss, batch, sizes)
        except Exception as error:
            splits = max(sizes) > 1 and self._update.in_backward is None
            if moment is None or not splits or not out_of_memory(error):
                raise
            self._give_up(moment)
            return True
        return False

    def _go_through(self, loss_of: Loss, batch: Any, sizes: list[int]) -> None:
        window = self._open(Window(len(sizes), whole=True))
        for part, size in zip(self._split(batch, sizes), sizes, strict=True):
            if self._graphs is not None and self._by_graph(self._graphs, loss_of, part, sum(sizes), size):
                continue
            with self.autocast():
                loss = loss_of(self.model, part)
            if isinstance(loss, tuple):
                weight = float(loss[1])
                self._backward(loss[0] / weight, weight)
            else:
                window.total = float(sum(sizes))
                self._backward(loss, float(size))

    def _by_graph(self, graphs: Graphs, loss_of: Loss, part: Any, total: int, size: int) -> bool:
        """Go forward and backward by a graph; False if it is to be done as usual."""
        divisor = total / size

        def backward(part: Any) -> torch.Tensor:
            with self.autocast():
                loss = loss_of(self.model, part)
            if isinstance(loss, tuple):
                raise UsageError("cuda_graphs need the loss as a mean: a weight would have to be read.")
            (loss if divisor == 1.0 else loss / divisor).backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        loss, window = graphs.accumulate(backward, part, divisor), self._window
        if loss is None or window is None:
            return False
        window.total = float(total)
        window.add(loss, float(size))
        self._count(window, loss)
        return True

    # ---- A loop of one's own -------------------------------------------------------------------------

    def windows(self, loader: Iterable[Any]) -> Iterator["Micros"]:
        """Return the windows of one pass over the data; each gives its micro-batches.

        A window's micro-batches are fetched before its first is handed out, so that the last one, which may
        be shorter, is divided by what it has. After ``load_state_dict`` the first call goes on where the
        state was saved: give it the same data.
        """
        for group in self._position.groups(loader, self._steps, self.accumulation.partial_window):
            self._expect_closed()
            resumed, self._resumed = self._resumed, None
            yield Micros(self, self._open(resumed or Window(len(group))), group)
            self._expect_closed()

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> StepResult | None:
        """Go backward from a micro-batch's loss.

        Args:
            loss: its mean.
            weight: what the mean is over (tokens, samples), if micro-batches differ; all of a window or none.

        Returns:
            What became of the window, if it is one that ``windows`` did not open and this filled it.
        """
        window = self._window or self._open(Window(self._steps, by_hand=True))
        self._backward(loss, weight)
        full = window.by_hand and window.done == window.planned
        return self._close() if full else None

    def flush(self) -> StepResult | None:
        """Close an open window with the micro-batches that it has; None if there are none."""
        if self._window is None or not self._window.done:
            self._window = None
            return None
        return self._close()

    # ---- Windows -------------------------------------------------------------------------------------

    def _open(self, window: Window) -> Window:
        if self._update.torn:
            raise TornUpdateError(INTERRUPTED)
        self._window, self._before = window, self.micro_step
        self._update.begin()
        self._tell("on_window_begin")
        return window

    def _backward(self, loss: torch.Tensor, weight: float | None) -> None:
        window = self._window
        if window is None:
            raise AssertionError("a backward belongs to a window")
        self._expect_whole()
        with self._update.or_undone():
            self._scaler.scaled(window.add(loss, weight)).backward()  # type: ignore[no-untyped-call]
        self._count(window, loss)

    def _count(self, window: Window, loss: torch.Tensor) -> None:
        window.interrupted = False
        self.micro_step += 1
        if self.callbacks:
            self._tell("on_micro_step_end", loss.detach())

    def _close(self, retried: int = 0) -> StepResult:
        window, scale = self._window, self._scaler.scale
        if window is None:
            raise AssertionError("an update belongs to a window")
        self._expect_whole()
        with self._update.or_undone():
            loss = window.mean_loss()
            window.interrupted = True
            found_inf, norm = self._update.make(window, lambda: self._tell("on_optimizer_step_begin"))
        self._drop_window()
        self._position.close()
        self.optimizer_step += not found_inf
        self._update.done()
        if not found_inf:
            self._tell("on_optimizer_step_end")
        result = StepResult(
            not found_inf, found_inf, scale, self.micro_step, self.optimizer_step, retried, loss, norm
        )
        self._tell("on_window_end", result)
        return result

    def _drop_window(self) -> None:
        self._window = None
        self._update.clear()

    def _give_up(self, moment: Moment | None) -> None:
        """Be as before the batch."""
        if self._window is not None:
            self.micro_step = self._before
        self._drop_window()
        if moment is not None:
            moment.restore()

    def _expect_closed(self) -> None:
        if self._window is not None:
            raise UsageError(
                f"A window is open, with {self._window.done} of {self._window.planned} micro-batches: "
                "give each a backward, or close it with engine.flush()."
            )

    def _expect_whole(self) -> None:
        if self._window is not None and self._window.interrupted:
            raise UsageError(
                "A backward or the update of this window was interrupted, and its gradients are not whole. "
                "Go on from a saved state; or hand whole batches to engine.step, which begins again by "
                "itself."
            )

    def _tell(self, moment: str, *what: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, moment)(self, *what)

    # ---- Saving and resuming -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that a run needs to go on bit for bit, inside a window too: tensors and plain values.

        Raises:
            TornUpdateError: the last update was interrupted.
            UsageError: a backward was interrupted; or micro-batches are carried over to the next epoch.
        """
        return resume.state_of(self)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a state; the next pass over the data begins where it was.

        Raises:
            UsageError: it does not suit this engine; nothing was loaded.
        """
        resume.go_on(self, saved)

    def save(self, path: str | Path) -> None:
        """Write the state to a file: the whole of it or nothing."""
        state.save(self.state_dict(), Path(path))

    def load(self, path: str | Path) -> None:
        """Go on from a file that ``save`` wrote.

        Raises:
            FileFormatError: it is something else, or damaged.
        """
        self.load_state_dict(state.load(Path(path)))


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
