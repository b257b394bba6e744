"""The engine: who divides, scales, clips, steps and counts, so that nobody else has to.

    window:  micro-batch ── forward ── backward ┐
             micro-batch ── forward ── backward ├─> update.py: correct -> unscale -> clip -> step -> scheduler
             micro-batch ── forward ── backward ┘              once       once      once    if all is finite

Three doors lead in. ``fit`` trains for epochs. ``step(batch)`` splits a batch itself, and finer when memory
runs out. ``windows(loader)`` serves a loop of one's own.
"""

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import ref

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.configuration import Configuration
from memfit.train.accumulation_window import Window
from memfit.train.callbacks import Callback, Saving
from memfit.train.data.position import batch_size_of
from memfit.train.data.split_batch import batch_size, split
from memfit.train.full_batch import WholeBatches
from memfit.train.job import Job, Loss
from memfit.train.resume import engine_state, state_file
from memfit.train.setup import job_of, set_up
from memfit.train.step_result import StepResult
from memfit.train.update import Protect
from memfit.train.window_ledger import Accounts


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
        whole = job_of(job, optimizer, loss, scheduler, max_grad_norm)
        configuration = Configuration.of(plan)
        norm = configuration.clipped_to(whole.max_grad_norm)
        update = set_up(whole, configuration.plan, norm, cuda_graphs=cuda_graphs, protect=protect)
        self.model, self.plan = whole.model, configuration.plan
        self.optimizer, self.scheduler = update.optimizer, update.scheduler
        if isinstance(callbacks, Callback) or not all(isinstance(one, Callback) for one in callbacks):
            raise UsageError(
                "Engine(callbacks=[...]) takes a list of callbacks, such as memfit.Saving(path)."
            )
        self.callbacks = tuple(sorted(callbacks, key=lambda callback: isinstance(callback, Saving)))
        self.epoch = 0
        """Passes of ``fit`` over the data so far."""
        self.epochs = 0
        """How many ``fit`` is to make in all."""
        self.batches: int | None = None
        """How many an epoch of ``fit`` has, if its loader knows."""
        self._stopped = False
        self._accounts = Accounts(update, partial(_tell, ref(self)))
        self._whole = WholeBatches(
            self._accounts, self.model, self.plan, whole.loss or _no_loss, size, split, retry=retry
        )
        self._accumulation = self.plan.accumulation or Accumulation(gradient_accumulation_steps=1)
        self._resumed: Window | None = None

    @property
    def micro_step(self) -> int:
        """Micro-batches so far."""
        return self._accounts.micro_step

    @property
    def optimizer_step(self) -> int:
        """Updates so far."""
        return self._accounts.optimizer_step

    @property
    def is_whole(self) -> bool:
        """Whether the run stands between windows, and its last update is made or undone."""
        return self._accounts.window is None and not self._accounts.update.torn

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
        return self.plan.autocast(self.model)

    def __enter__(self) -> Self:
        """Have the end of the block check that no window was left open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Complain about an open window, unless something else went wrong."""
        if kind is None:
            self._accounts.expect_closed()

    # ---- Epochs --------------------------------------------------------------------------------------

    def fit(self, loader: Iterable[Any], epochs: int = 1) -> StepResult | None:
        """Train until so many epochs are done in all, a batch to an optimizer step.

        Args:
            loader: a ``DataLoader``, or whatever can be gone through once an epoch.
            epochs: in all: a run that went on from a saved state makes those that are left.

        Returns:
            What the last batch became; None if there was none.
        """
        result, tell = None, self._accounts.tell
        self.epochs = epochs
        self.batches = _length(loader)
        self._stopped = False
        self._go_on_inside_epoch(loader)
        tell("on_fit_begin")
        try:
            while self.epoch < epochs and not self._stopped:
                tell("on_epoch_begin")
                for batch in self.through(loader):
                    result = self.step(batch)
                    if self._stopped:
                        return result
                if self.epoch and not self.batch:
                    raise UsageError(
                        f"The loader gave no batch in epoch {self.epoch + 1}: a generator can be gone "
                        "through once. Give fit what can be gone through once an epoch."
                    )
                self.epoch += 1
                tell("on_epoch_end")
        finally:
            tell("on_fit_end")
        return result

    def _go_on_inside_epoch(self, loader: Iterable[Any]) -> None:
        """Have ``fit`` begin where it was stopped in an epoch, as it would from a saved state."""
        position = self._accounts.position
        if position.began is not None and position.loader is loader:
            position.load_state_dict(position.state_dict(0), position.random())

    def stop(self) -> None:
        """Have ``fit`` end after the batch that it is at."""
        self._stopped = True

    def through(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Return the batches of one pass over the data, for ``step``: a resumed run goes on where it was.

        After ``load_state_dict`` the first call begins where the state was saved: give it the same data.
        """
        _expect_batches_of(self._accumulation.global_batch_size, loader, "global_batch_size", "an update")
        for (batch,) in self._accounts.position.groups(loader, 1, "flush"):
            yield batch

    @property
    def batch(self) -> int:
        """Batches, or micro-batches, of this pass over the data that are done."""
        return self._accounts.position.consumed

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
        self._accounts.expect_closed()
        return self._whole.step(batch)

    # ---- A loop of one's own -------------------------------------------------------------------------

    def windows(self, loader: Iterable[Any]) -> Iterator["Micros"]:
        """Return the windows of one pass over the data; each gives its micro-batches.

        A window's micro-batches are fetched before its first is handed out, so that the last one, which may
        be shorter, is divided by what it has. After ``load_state_dict`` the first call goes on where the
        state was saved: give it the same data.
        """
        accounts, settings = self._accounts, self._accumulation
        self._expect_no_graphs()
        _expect_batches_of(settings.micro_batch_size, loader, "micro_batch_size", "a micro-batch")
        steps = settings.gradient_accumulation_steps or 1
        for group in accounts.position.groups(loader, steps, settings.partial_window):
            accounts.expect_closed()
            resumed, self._resumed = self._resumed, None
            yield Micros(self, accounts.open(resumed or Window(len(group))), group)
            accounts.expect_closed()

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> StepResult | None:
        """Go backward from a micro-batch's loss.

        Args:
            loss: its mean.
            weight: what the mean is over (tokens, samples), if micro-batches differ; all of a window or none.

        Returns:
            What became of the window, if it is one that ``windows`` did not open and this filled it.
        """
        accounts = self._accounts
        window = accounts.window
        self._expect_no_graphs()
        if window is None:
            planned = self._accumulation.gradient_accumulation_steps or 1
            window = accounts.open(Window(planned, by_hand=True))
        accounts.backward(window, loss, weight)
        accounts.position.taken()
        return accounts.close(window) if window.by_hand and window.done == window.planned else None

    def _expect_no_graphs(self) -> None:
        if self._accounts.update.graphs is not None:
            raise UsageError(
                "cuda_graphs=True captures a forward and its backward, which in a loop of one's own are the "
                "loop's: use engine.fit or engine.step, or leave cuda_graphs out."
            )

    def drop(self) -> None:
        """Leave out an open window, with its gradients: in a loop of one's own, after a failed backward."""
        self._accounts.drop()
        self._accounts.position.close()

    def flush(self) -> StepResult | None:
        """Close an open window with the micro-batches that it has; None if there are none."""
        window = self._accounts.window
        if window is None:
            return None
        if not window.done:
            self.drop()
            return None
        return self._accounts.close(window)

    # ---- Saving and resuming -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that a run needs to go on bit for bit, inside a window too: tensors and plain values.

        As with PyTorch's own, tensors are those of the run: training goes on in them. For a snapshot that
        stays in memory copy them (``copy.deepcopy``).

        Raises:
            TornUpdateError: the last update was interrupted.
            UsageError: a backward was interrupted; or micro-batches are carried over to the next epoch.
        """
        return engine_state.state_of(self)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a state; the next pass over the data begins where it was. The state stays as it is.

        Raises:
            UsageError: it does not suit this engine; nothing was loaded.
            FileFormatError: it is damaged; nothing was loaded.
        """
        engine_state.go_on(self, saved)

    def save(self, path: str | Path) -> None:
        """Write the state to a file: the whole of it or nothing."""
        state_file.save(self.state_dict(), Path(path))

    def load(self, path: str | Path) -> None:
        """Go on from a file that ``save`` wrote.

        Raises:
            FileFormatError: it is something else, or damaged.
            UsageError: it does not suit this engine. Either way nothing was loaded.
        """
        self.load_state_dict(state_file.load(Path(path)))


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader of an IterableDataset has a length that raises
        return None


def _expect_batches_of(size: int | None, loader: Iterable[Any], name: str, what: str) -> None:
    given = batch_size_of(loader)
    if size is not None and given is not None and given != size:
        raise UsageError(
            f"The loader's batch_size is {given}, and {name}={size}: here each of its batches makes {what}. "
            "fit and step take whole batches and divide them; windows takes micro-batches."
        )


def _tell(engine: "ref[Engine]", moment: str, *what: Any) -> None:
    """Call the callbacks; what accounts hold is no engine, so that one goes when its last name goes."""
    there = engine()
    if there is not None:
        for callback in there.callbacks:
            getattr(callback, moment)(there, *[one.detach() if torch.is_tensor(one) else one for one in what])


def _no_loss(model: nn.Module, batch: Any) -> torch.Tensor:  # noqa: ARG001 - stands for a loss
    raise UsageError("engine.step needs to know the loss: Engine(model, plan, optimizer=..., loss=...).")


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
            self._engine._accounts.position.hand_out()
            yield item
            if self._window.done != done + 1:
                raise UsageError(
                    "A micro-batch was handed out and engine.backward was not called for it once."
                )
        self.result = self._engine.flush()
