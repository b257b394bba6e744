"""The engine: divides batches, scales, clips, steps and counts, so that a training loop need not.

    window:  micro-batch ── forward ── backward ┐   optimizer_update.py
             micro-batch ── forward ── backward ├─> correct -> unscale -> clip -> step -> scheduler
             micro-batch ── forward ── backward ┘   once       once      once    if all gradients are finite

There are three ways to train. ``fit`` trains for epochs. ``step(batch)`` makes an update from one batch, and
divides it if the plan says so. ``windows(loader)`` supports a training loop of your own, and gathers batches.
When memory runs out, ``fit`` and ``step`` divide batches further.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self
from weakref import ref

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.mechanisms.split_batch import BatchSplitter
from memfit.strategies.precision import autocast_of_model
from memfit.strategies.read_configuration import Configuration
from memfit.strategies.sharding import module_inside_ddp
from memfit.train.accumulation_ledger import AccumulationLedger
from memfit.train.accumulation_window import AccumulationWindow, StepResult
from memfit.train.arena_steps import ArenaSteps
from memfit.train.batch_updates_with_retry import DividedBatchStepper, raise_missing_loss
from memfit.train.batches_by_window import MicroBatches, gather_batches_by_window
from memfit.train.callbacks import Callback, call_callbacks, callbacks_in_call_order
from memfit.train.data.loader_order import set_sampler_epoch
from memfit.train.data.loader_position import check_loader_batch_size, number_of_batches
from memfit.train.engine_setup import set_up_engine
from memfit.train.optimizer_update import Protect
from memfit.train.resume.save_and_load_run import ResumableRun
from memfit.train.resume.saved_engine_parts import EngineParts
from memfit.train.training_job import Interval, Job, Loss, as_job
from memfit.train.validation import Metric, run_validation, validation_metric_names, warn_of_evaluation_mode


class Engine(ResumableRun):
    """Trains a model with less memory, and with the same result.

    Args:
        job: a ``Job``, or a model; with a model, pass ``optimizer`` and the job's other parts by name.
        plan: a ``Plan``, the settings of a strategy, or a list of settings, applied to the model. Or anything
            that ``configure`` reads or returns; with settings of the arena, its steps run in ``arena``.
        optimizer, loss, scheduler, scheduler_interval, scheduler_metric, max_grad_norm: as in ``Job``.
        callbacks: called at the events of training.
        size: ``size(batch)`` returns the number of samples of a custom batch type.
        split: ``split(batch, sizes)`` returns the parts of a custom batch type.
        retry: start a batch again in smaller parts when memory runs out, and split later ones alike. Without
            it buffers and random numbers are not copied, and stay as a failed step leaves them.
        protect: when to copy parameters and optimizer state to the host before an update, so that running
            out of memory inside it does no harm: ``"always"``, ``"never"``, or ``"auto"``: the first time
            and whenever the allocator had to release its cache.

    Raises:
        UsageError: parts are missing, or the plan does not suit them.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> engine = Engine(
        ...     model,
        ...     Accumulation(parts_per_batch=4),
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
        scheduler_interval: Interval | None = None,
        scheduler_metric: str | None = None,
        max_grad_norm: float | None = None,
        callbacks: Iterable[Callback] = (),
        size: Callable[[Any], int] | None = None,
        split: Callable[[Any, list[int]], list[Any]] | None = None,
        retry: bool = True,
        protect: Protect = "auto",
    ) -> None:
        job = as_job(job, optimizer, loss, scheduler, scheduler_interval, scheduler_metric, max_grad_norm)
        configuration = Configuration.of(plan)
        norm, arena = configuration.clipped_to(job.max_grad_norm), configuration.arena is not None
        self._arena_steps = ArenaSteps(configuration.arena, job.model)
        self.model, update, gradients = set_up_engine(
            job, configuration.plan, norm, retry=retry, protect=protect, arena=arena
        )
        self.plan, self._ranks = configuration.plan, gradients.ranks
        self.optimizer, self.scheduler = update.optimizer, update.scheduler
        self.callbacks = callbacks_in_call_order(callbacks)
        self.arena = self._arena_steps.arena
        """The arena that the configuration asks for: ``arena.outputs``, ``arena.report()``."""
        self.epoch, self.epochs = 0, 0
        """Epochs that ``fit`` has completed, and how many it trains in total."""
        self.batches: int | None = None
        """Batches of an epoch of ``fit``, if its loader has a length."""
        self.metrics: dict[str, float] = {}
        """The means of the last validation, by name."""
        self._stopped = self._left_others = False
        self._ledger = AccumulationLedger(update, gradients, partial(call_callbacks, ref(self)))
        self._loss, self._splitter = job.loss or raise_missing_loss, BatchSplitter(size, split)
        self._full_batch = DividedBatchStepper(
            self._ledger, self.model, self.plan, self._loss, self._splitter, self._arena_steps, retry=retry
        )
        self._accumulation = self.plan.accumulation or Accumulation()

    @property
    def rank(self) -> int:
        """The number of this process among those that train together; 0 if it is alone."""
        return self._ranks.rank

    @property
    def micro_step(self) -> int:
        """Micro-batches so far."""
        return self._ledger.micro_step

    @property
    def optimizer_step(self) -> int:
        """Updates so far."""
        return self._ledger.optimizer_step

    @property
    def is_whole(self) -> bool:
        """Whether no window is open, and the last update was completed or undone.

        With several ranks, not after an exception ended ``fit``: the others cannot save with this one.
        """
        return self._ledger.window is None and not self._ledger.update.torn and not self._left_others

    @property
    def notes(self) -> list[str]:
        """What the plan's strategies cost for this model, and where they save nothing."""
        noting = (each for each in self.plan.strategies() if hasattr(each, "notes"))
        return [note for each in noting for note in each.notes(self.model)]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward and its loss; ``step`` enters it itself."""
        return autocast_of_model(self.plan.precision, self.model)

    def __enter__(self) -> Self:
        """Enter a block whose end checks that no window was left open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise an error if a window is open, unless another error is being raised."""
        if kind is None:
            self._ledger.expect_closed()

    # ---- Epochs --------------------------------------------------------------------------------------

    def fit(
        self,
        loader: Iterable[Any],
        epochs: int = 1,
        *,
        validate: Iterable[Any] | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> StepResult | None:
        """Train up to a total number of epochs.

        Each batch makes an update or, with ``batches_per_update``, each group of batches.

        Args:
            loader: a ``DataLoader``, or any iterable that can be iterated once per epoch.
            epochs: in total: a resumed run trains those that are left.
            validate: batches over which ``metrics`` are averaged after each epoch.
            metrics: by name, each called as a loss is; by default ``"loss"``, the engine's own.

        Returns:
            The result of the last update; None if there was none.
        """
        result, notify, schedule = None, self._ledger.notify, self._ledger.update.schedule
        schedule.expect_metric(names := validation_metric_names(metrics, validate))
        self.epochs, self.batches = epochs, number_of_batches(loader)
        self._stopped = self._left_others = False
        self._ranks.agree("engine.fit", same=lambda: {"epochs": f"{epochs}", "metrics": f"{[*names]}"})
        self._resume_inside_epoch(loader)
        notify("on_fit_begin")
        try:
            while self.epoch < epochs and not self._stopped:
                warn_of_evaluation_mode(self.model)
                self._ledger.position.begin_epoch()
                set_sampler_epoch(loader, self.epoch, self._ranks)
                notify("on_epoch_begin")
                for result in self._updates(loader):
                    if self._agree_to_stop():
                        return result
                if self.epoch and not self._ranks.agree("engine.fit", self.batch)[0]:
                    raise UsageError(  # noqa: TRY301 - it ends fit as any other error does
                        f"The loader returned no batches in epoch {self.epoch + 1}. A generator, for "
                        "example, can be iterated only once: pass an iterable that starts anew in each epoch."
                    )
                self.epoch += 1
                schedule.after_epoch()  # before the validation, which may be interrupted
                if validate is not None:
                    schedule.after_validation(self.validate(validate, metrics))
                    notify("on_validation_end", self.metrics)
                notify("on_epoch_end")
                self._agree_to_stop()
        except BaseException as error:
            self._left_others = self._ranks.size > 1
            self._ranks.report(error, "fit", waiting=False)
            raise
        finally:
            notify("on_fit_end")
        return result

    def _updates(self, loader: Iterable[Any]) -> Iterator[StepResult]:
        """Train for one epoch, and yield the result of each update."""
        if not self._accumulation.gathers:
            for batches in self._groups_of_one(loader):
                yield self.step(*batches) if batches else self._full_batch.update([])
            return
        ends = self.epoch + 1 == self.epochs or self._accumulation.remainder != "carry"
        for group in gather_batches_by_window(self._ledger, self._accumulation, loader, self._batches_left):
            result = self._full_batch.gather(group.window, group.left, closes=group.fills or ends)
            if result is not None:
                yield result

    def _agree_to_stop(self) -> bool:
        """Return whether a rank wants to end ``fit``: then all do."""
        self._stopped = bool(self._ranks.agree("engine.fit", self._stopped)[0])
        return self._stopped

    def _resume_inside_epoch(self, loader: Iterable[Any]) -> None:
        """Have ``fit`` continue where it stopped inside an epoch, as from a saved state."""
        position = self._ledger.position
        if position.began is not None and position.loader is loader:
            position.load_state_dict(position.state_dict(), position.random_state())

    def validate(
        self, loader: Iterable[Any], metrics: Mapping[str, Metric] | None = None
    ) -> dict[str, float]:
        """Return the means of metrics over a loader, in evaluation mode; arguments as for ``fit``."""
        wanted, test, size = metrics or {"loss": self._loss}, self._arena_steps.test, self._splitter.size
        # A replica's own forward is collective, but the ranks may validate different numbers of batches.
        model = module_inside_ddp(self.model)
        together = self._ledger.gradients.reduces_in_backward and self._ranks.size > 1
        self.metrics = run_validation(
            model, loader, wanted, self.autocast, test, size, self._ranks, together=together
        )
        return self.metrics

    def end_epoch(self) -> None:
        """Step a scheduler by epoch or metric: call this after each epoch of a loop of your own."""
        self._ledger.update.schedule.after_epoch()
        self._ledger.update.schedule.after_validation(self.metrics)

    def stop(self) -> None:
        """End ``fit`` after the current batch."""
        self._stopped = True

    def through(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of one epoch, for ``step``.

        After ``load_state_dict`` the first call continues where the state was saved: pass the same data. A
        rank that has no batches left takes part in the updates from those of other ranks.
        """
        for batches in self._groups_of_one(loader):
            if not batches:
                self._full_batch.update([])
            yield from batches

    def _groups_of_one(self, loader: Iterable[Any]) -> Iterator[list[Any]]:
        self._accumulation.expect_divided("engine.through")
        check_loader_batch_size(self._accumulation, loader)
        return self._ledger.position.groups(loader, 1, "step")

    @property
    def batch(self) -> int:
        """Batches of this epoch that are done."""
        return self._ledger.position.consumed

    @property
    def batches_per_update(self) -> int:
        """Batches that make one update."""
        return self._accumulation.batches_per_update or 1

    # ---- Whole batches -------------------------------------------------------------------------------

    def step(self, batch: Any) -> StepResult:
        """Make one update from a batch.

        Args:
            batch: tensors, and tuples, lists and dicts of them; ``split`` divides it.

        Raises:
            UsageError: there is no loss, or a window is open.
            torch.OutOfMemoryError: single samples do not fit, or the update does not: parameters, buffers,
                optimizer state and random numbers are restored.
            TornUpdateError: memory ran out inside the optimizer's step, and there is no copy to restore.
        """
        self._accumulation.expect_divided("engine.step")
        self._ledger.expect_closed()
        return self._full_batch.update([batch])

    # ---- A loop of your own --------------------------------------------------------------------------

    def windows(self, loader: Iterable[Any]) -> Iterator[MicroBatches]:
        """Yield the windows of one epoch, which gather batches; each yields these as its micro-batches.

        All micro-batches of a window are fetched before the first is yielded, so that the last window, which
        may be shorter, is divided by its actual number. After ``load_state_dict`` the first call continues
        where the state was saved: pass the same data. With ``remainder="carry"`` the last window may stay
        open: the next epoch continues it, or ``flush`` makes an update of it.
        """
        self._accumulation.expect_gathered("engine.windows")
        ledger, carries = self._ledger, self._accumulation.remainder == "carry"
        for group in gather_batches_by_window(ledger, self._accumulation, loader):
            window, closes = group.window, group.fills or not carries
            done = window.done + len(group.left)
            if ledger.window is None:
                ledger.open(window)
            yield MicroBatches(group, ledger, closes=closes)
            if closes or window.done != done:
                ledger.expect_closed()

    def _batches_left(self) -> int | None:
        """Return how many batches ``fit`` will still take; None if its loader has no length."""
        if self.batches is None:
            return None
        return (self.epochs - self.epoch) * self.batches - self.batch

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> StepResult | None:
        """Run backward from a micro-batch's loss.

        Args:
            loss: the mean over the micro-batch.
            weight: the number of tokens or samples in that mean, if micro-batches differ; pass it for all
                micro-batches of a window or for none.

        Returns:
            The window's result, if this backward filled a window that ``windows`` did not open.
        """
        ledger = self._ledger
        window = ledger.window
        if window is None:
            self._accumulation.expect_gathered("engine.backward")
            window = ledger.open(AccumulationWindow(self._accumulation.steps, by_hand=True))
        with ledger.reporting():
            ledger.backward(window, loss, weight)
        ledger.position.confirm()
        return ledger.close(window) if window.by_hand and window.done == window.planned else None

    def drop(self) -> None:
        """Drop an open window and its gradients: after a failed backward in your own training loop."""
        self._ledger.drop()
        self._ledger.position.close()

    def flush(self) -> StepResult | None:
        """Update from the micro-batches of an open window so far; return None if there are none.

        With several ranks, call this on all of them; one without micro-batches takes part in the update.
        """
        result = self._ledger.flush()
        if result is None:
            self._ledger.position.close()
        return result

    def _parts(self) -> EngineParts:
        return EngineParts(
            module_inside_ddp(self.model),
            self.plan,
            self.optimizer,
            self.scheduler,
            self.callbacks,
            self._accumulation,
            self._ledger,
            self._full_batch,
            self._ranks,
            self.epoch,
        )
