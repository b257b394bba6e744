"""Run a script with strategies injected: ``install(CHANGE.json)`` is called before it.

When an optimizer takes the parameters of a model, the model gets the plan, as if the script had called
``memfit.apply`` just before. Submodules get no plan of their own, even if the script calls them directly. A
plan that the script itself applies, as with ``memfit.Engine``, is completed: its own settings stay. Sharding
takes more: see ``inject_sharding``.
"""

import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from memfit.errors import UsageError
from memfit.injection.inject_own_sharding import OwnShardingInjector
from memfit.injection.injection_files import (
    InjectionReport,
    InjectionReporter,
    InjectionSettings,
    injection_report_writer,
)
from memfit.injection.models_of_optimizers import (
    ModelsOfOptimizers,
    optimizer_parameters_as_lists,
    parameters_in_optimizer_lists,
)
from memfit.patching.after_import import call_after_import
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.random_state import seed_generators
from memfit.recording.script_loaders import creating_line_and_library
from memfit.records import LoaderBatchSize, OperationCounts
from memfit.run.script_end import hide_output
from memfit.user_lines import innermost_line_of_place, innermost_user_line

if TYPE_CHECKING:
    from memfit.injection.inject_optimizer_state import OptimizerStateInjector
    from memfit.injection.inject_sharding import ShardingInjector
    from memfit.recording.second_step_operations import SecondStepRecorder
    from memfit.strategies.mechanisms.recomputation_counter import OperationCounter
    from memfit.strategies.plan import Plan

_OPTIMIZER = Patch("torch.optim.optimizer:Optimizer", "__init__", why="carry out a plan on what it trains")
_LOADER = Patch("torch.utils.data.dataloader:DataLoader", "__init__", why="change the script's batch size")
_APPLY = Patch("memfit.strategies.apply", "apply_to_model", why="pass on the plan")

_ENGINE = "memfit.train.engine"


def install(path: str) -> None:
    """Inject the change in a file: as soon as the script imports torch.

    Args:
        path: of ``InjectionSettings`` as JSON.
    """
    settings = msgspec.json.decode(Path(path).read_bytes(), type=InjectionSettings)
    inject_change(settings, injection_report_writer(Path(settings.report)))


def inject_change(settings: InjectionSettings, on_report: Callable[[InjectionReport], None]) -> None:
    """Inject a change into the script of this process: as soon as it imports torch.

    Args:
        settings: the change, and how to inject it.
        on_report: called with what became of it, whenever that changes.
    """
    if settings.silent:  # a user who has answered the script's prompts once is not asked again
        hide_output()
    if settings.change.eager:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # PyTorch's own switch
    report = InjectionReporter(on_report)
    own = settings.change.own_sharding
    sharding = OwnShardingInjector(own, lambda calls: report.update(sharding_calls=calls))
    sharding.install(InstalledHooks())  # before torch: what imports it may be among what is to be changed
    call_after_import("torch", functools.partial(_inject_now, settings, report))


def install_in_fork(path: str, called: Any) -> None:
    """Inject the change in a file into a fork of a script under another change, which has not trained.

    Args:
        path: of ``InjectionSettings`` as JSON. It reports elsewhere than the script's own change, may
            record no operations, and may have a plan if that has none.
        called: the module that the script is calling; None if it calls none.

    Raises:
        UsageError: the plan would have been applied to other modules before.
    """
    settings = msgspec.json.decode(Path(path).read_bytes(), type=InjectionSettings)
    for injected in _injected:
        injected.become(settings, called)


def _inject_now(settings: InjectionSettings, report: InjectionReporter) -> None:
    import torch

    change = settings.change
    hooks, recording = InstalledHooks(), InstalledHooks()
    models = ModelsOfOptimizers()
    models.names.follow(hooks)
    if not change.strategies:
        models.note_optimizers(hooks)
        if settings.counts_backward:
            counter = _counter(settings, report)
            counter.install(hooks)
            models.on_found = counter.watch
    else:
        try:
            _PlanInjector(settings, report, models).install(hooks)
        except UsageError as error:  # a plan file that was edited
            report.update(refusals=((str(error), ""),))
            raise
    if change.updates_held_back > 1:
        from memfit.injection.hold_back_updates import HeldBackUpdates

        HeldBackUpdates(
            change.updates_held_back,
            lambda why: report.update(cannot_accumulate=why),
            settles=not settings.late,
        ).install(hooks)
    if change.fused:
        for kind in vars(torch.optim).values():
            if isinstance(kind, type) and "fused" in inspect.signature(kind).parameters:
                hooks.wrap(_OPTIMIZER, "__init__", _fused, on=kind)
    operations = None
    if change.operations:
        from memfit.recording.second_step_operations import SecondStepRecorder

        seed_generators()  # a script that seeds none must draw the same samples in each run
        operations = SecondStepRecorder(Path(settings.operations))
        operations.install(recording)
    if change.loader is not None:
        hooks.wrap(_LOADER, "__init__", functools.partial(_resized, change.loader))
    _injected.append(_Injected(report, bool(change.strategies), models, operations, recording))


def _counter(settings: InjectionSettings, report: InjectionReporter) -> "OperationCounter":
    from memfit.strategies.mechanisms.recomputation_counter import OperationCounter

    def counted(counts: OperationCounts, again: dict[str, int], missing: tuple[str, ...]) -> None:
        report.update(operations=counts, again=again, missing=missing)

    return OperationCounter(counted, in_backward=settings.counts_backward)


@dataclass(frozen=True, slots=True)
class _Injected:
    """A change that was injected into this process."""

    report: InjectionReporter
    has_plan: bool
    models: ModelsOfOptimizers
    operations: "SecondStepRecorder | None"
    recording: InstalledHooks
    """Those that record operations."""

    def become(self, settings: InjectionSettings, called: Any) -> None:
        """Do what ``install_in_fork`` does."""
        self.report.move(Path(settings.report))
        if not settings.change.operations:
            self.recording.remove()
        elif self.operations is not None:
            self.operations.move(Path(settings.operations))
        strategies = settings.change.strategies
        if not strategies or self.has_plan:
            return
        if self.models.found and not self.models.are_final:
            raise UsageError("the script has put its models into others since it created their optimizer.")
        if called is not None and not self.models.is_model(called):
            raise UsageError("the script calls a part of its model.")
        if "optimizer_state" in strategies and _ENGINE in sys.modules:
            raise UsageError("the script uses memfit.Engine, which itself carries out optimizer_state.")
        injector = _PlanInjector(settings, self.report, self.models)
        injector.install(InstalledHooks())
        injector.catch_up()


_injected: list[_Injected] = []
"""What ``install`` has injected: state of the process, for a fork of it that goes on under another change."""


class _PlanInjector:
    """Applies a plan to each model whose parameters an optimizer takes, and completes the script's plans."""

    def __init__(
        self, settings: InjectionSettings, report: InjectionReporter, models: ModelsOfOptimizers
    ) -> None:
        from memfit.injection.scale_losses import LossScaling
        from memfit.injection.uncalled_models import UncalledModels
        from memfit.strategies.read_configuration import configure

        change = settings.change
        self._optimizer, self._created = change.optimizer, len(models.all)
        plan = configure(change.plan).plan  # with accumulation: not everything suits it
        if change.micro_batches is not None:
            plan = replace(plan, accumulation=None)
        precision = plan.precision
        self._scaling = LossScaling(None if precision is None else precision.loss_scale)
        if precision is not None:
            plan = replace(plan, precision=replace(precision, loss_scale=None))
        self._plan = replace(plan, optimizer_state=None)
        self._file = report
        self._state: OptimizerStateInjector | None = None
        if plan.optimizer_state is not None:
            from memfit.injection import inject_optimizer_state

            self._state = inject_optimizer_state.OptimizerStateInjector(
                plan.optimizer_state,
                lambda why: report.update(unfit_optimizer=why),
                strict=settings.strict,
            )
        self._counter = _counter(settings, report)
        self._models, self._names = models, models.names
        self._planned: list[tuple[weakref.ref[Any], str]] = []
        self._refusals: list[tuple[str, str]] = []
        self._applying = False
        self._uncalled = UncalledModels(self._report)
        self._sharder: ShardingInjector | None = None
        if self._plan.sharding is not None:
            if self._state is not None:
                raise UsageError("memfit does not try optimizer_state and sharding together in a script.")
            from memfit.injection import inject_sharding

            self._sharder = inject_sharding.ShardingInjector(
                self._plan.sharding, self._plan, self._refuse, self._report, trains=settings.strict
            )

    def install(self, hooks: InstalledHooks) -> None:
        """Hook the creation of optimizers and their steps, and ``memfit.apply``."""
        from memfit.injection.checks_before_steps import ChecksBeforeSteps

        sliced = () if self._plan.batch_slices is None else self._planned
        ChecksBeforeSteps(lambda *why: self._file.update(caught=why), self._refuse, sliced).install(hooks)
        self._counter.install(hooks)
        hooks.wrap(_OPTIMIZER, "__init__", self._optimized)
        hooks.wrap(_APPLY, "apply_to_model", self._applied)
        if self._sharder is not None:
            self._sharder.install(hooks)
        self._scaling.install(hooks)

    def catch_up(self) -> None:
        """Apply the plan to the models of the optimizers that exist, as when they were created."""
        self._scaling.created(*(each() for each in self._models.all))
        taken: list[list[Any]] = [[] for _ in self._models.all]
        for found in self._models.found:
            model = found.model()
            if model is not None and self._optimizer in (None, found.optimizer):
                self._apply(model, found.line)
                taken[found.optimizer].append(model)
        if self._state is not None:
            for reference, models in zip(self._models.all, taken, strict=True):
                self._state.created(reference(), models)
            self._state.apply()

    def _optimized(
        self, original: Callable[..., None], optimizer: Any, params: Any, *args: Any, **kwargs: Any
    ) -> None:
        if self._sharder is not None and self._sharder.is_ready(optimizer):
            return
        entries = optimizer_parameters_as_lists(params)
        line = innermost_line_of_place(innermost_user_line(sys._getframe(2)))
        chosen = self._optimizer in (None, self._created)
        self._created += 1
        models = self._models.taken_by(parameters_in_optimizer_lists(entries)) if chosen else []
        for model in models:
            self._apply(model, line)
        if self._sharder is not None:
            entries = self._sharder.of_shards(entries)
            self._sharder.put_shards_in_containers()
        original(optimizer, entries, *args, **kwargs)
        if self._state is not None:
            self._state.created(optimizer, models)

    def _apply(self, model: Any, optimized_at: str) -> None:
        """Apply the plan; if no model gets it, the run is like the first."""
        from memfit.strategies.apply import apply, remove_copied_plan
        from memfit.strategies.mechanisms.wrap_forward import forward_wrappers
        from memfit.strategies.sharding import module_inside_ddp

        if any(reference() in set(model.modules()) for reference, _ in self._planned):
            return  # it has another optimizer, too
        if self._planned and not any("(plan: " in name for _, name in self._planned):
            remove_copied_plan(model)
        self._applying = True
        # Before fully_shard changes the class.
        name = f"{self._names.full_name(model)} (optimizer: {optimized_at})"
        try:
            if self._sharder is not None:
                self._sharder.shard(model)
            else:
                apply(model, self._plan)
        except UsageError as error:
            self._refuse(str(error), name)
            return
        finally:
            self._applying = False
        if self._sharder is not None or any(forward_wrappers(module_inside_ddp(model))):
            self._uncalled.watch(model)
        self._has_plan(model, name)

    def _applied(self, original: Any, model: Any, plan: "Plan", *, in_engine: bool = False) -> Any:
        """Apply a plan of the script's; an engine carries out what its plan leaves to us."""
        if self._applying:
            return original(model, plan)
        if not in_engine or self._state is None or plan.optimizer_state is not None:
            return self._applied_with_ours(original, model, plan)
        plan = replace(plan, optimizer_state=self._state.settings)
        result = self._applied_with_ours(original, model, plan)
        self._state.leave_to_engine(model)
        if not any(reference() is model for reference, _ in self._planned):
            self._planned_by_script(model)
        return result

    def _applied_with_ours(self, original: Callable[..., Any], model: Any, plan: "Plan") -> Any:
        """Apply a plan of the script's, and the strategies that it leaves to us."""
        from memfit.strategies.apply import revert

        if self._state is not None:
            self._state.expect_no_other(plan.optimizer_state)
        if self._sharder is not None:
            self._refuse("the script applies a plan itself. Add the sharding there.")
            return original(model, plan)
        for entry in list(self._planned):
            ours = entry[0]()
            if ours is not None and model in set(ours.modules()):
                revert(ours)
                self._planned.remove(entry)
                self._report()
        both = self._completed(plan)
        if both is None:
            return original(model, plan)
        try:
            result = original(model, both)
        except UsageError:  # ours does not suit
            return original(model, plan)
        self._planned_by_script(model)
        return result

    def _planned_by_script(self, model: Any) -> None:
        name = f"{self._names.full_name(model)} (plan: {innermost_line_of_place(innermost_user_line())})"
        self._has_plan(model, name)

    def _has_plan(self, model: Any, name: str) -> None:
        self._planned.append((weakref.ref(model), name))
        self._scaling.activate()
        self._counter.watch(model)
        self._report()

    def _completed(self, plan: "Plan") -> "Plan | None":
        """Return a plan with those of our strategies that it lacks; None if it has them, or they conflict."""
        ours = (each.name for each in fields(self._plan) if getattr(self._plan, each.name) is not None)
        lacking = [name for name in ours if getattr(plan, name) is None]
        try:
            return replace(plan, **{name: getattr(self._plan, name) for name in lacking}) if lacking else None
        except UsageError:
            return None

    def _refuse(self, why: str, model: str = "") -> None:
        self._refusals.append((why, model))
        self._report()

    def _report(self) -> None:
        sharder = self._sharder
        self._file.update(
            models=tuple(name for _, name in self._planned),
            refusals=tuple(self._refusals),
            uncalled=self._uncalled.names,
            shares=sharder.shares if sharder is not None else (),
            notes=sharder.notes if sharder is not None else (),
        )


def _fused(original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("fused") is None and kwargs.get("foreach") is None:
        kwargs["fused"] = True
    original(optimizer, *args, **kwargs)


def _resized(
    size: LoaderBatchSize,
    original: Callable[..., None],
    loader: Any,
    dataset: Any,
    batch_size: int | None = 1,
    *args: Any,
    **kwargs: Any,
) -> None:
    line, _ = creating_line_and_library(sys._getframe(2))
    if batch_size is not None and line == size.line and kwargs.get("batch_sampler") is None:
        batch_size = size.size
    original(loader, dataset, batch_size, *args, **kwargs)
