"""Run a script with strategies injected: ``python -m memfit.strategies.inject_plan CHANGE.json SCRIPT``.

The script runs as under ``memfit dry-run``, with its output hidden. When an optimizer takes the parameters of
a model, the model gets the plan, as if the script had called ``memfit.apply`` just before. Submodules get no
plan of their own, even if the script calls them directly. A plan that the script itself applies, as with
``memfit.Engine``, is completed: its own settings stay.
"""

import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from memfit.errors import UsageError
from memfit.ghost.patching.after_import import after_import
from memfit.recording.loader_batch_size import creator
from memfit.records import LoaderBatchSize
from memfit.run.script import run_as_main
from memfit.user_frame import innermost_line, user_line

if TYPE_CHECKING:
    from memfit.recording.hooks import InstalledHooks
    from memfit.strategies.plan import Plan


class Intervention(msgspec.Struct, frozen=True):
    """The change to make to a script: passed as JSON in a file."""

    module: bool
    """Whether the script is a module, as for ``python -m``."""
    strategies: tuple[str, ...]
    """Fields of a ``Plan``, each with its default settings."""
    fused: bool
    """Whether optimizers use ``fused=True`` unless the script chooses an implementation."""
    loader: LoaderBatchSize | None
    """The batch size that loaders created at its line get; None to leave them alone."""
    models: str
    """The file that receives the models with the plan, one per line, each with its optimizer's line."""


def main() -> None:
    """Run the script named on the command line."""
    _, path, *command = sys.argv
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # a user who has answered the script's prompts once is not asked again
        os.dup2(silence, stream)
    intervention = msgspec.json.decode(Path(path).read_bytes(), type=Intervention)
    after_import("torch", functools.partial(_intervene, intervention))
    run_as_main(tuple(command), module=intervention.module)


def _intervene(change: Intervention) -> None:
    import torch

    from memfit.recording.hooks import InstalledHooks

    hooks = InstalledHooks()
    if change.strategies:
        _PlanInjector(change).install(hooks)
    if change.fused:
        for kind in vars(torch.optim).values():
            if isinstance(kind, type) and "fused" in inspect.signature(kind).parameters:
                hooks.wrap(kind, "__init__", _fused)
    if change.loader is not None:
        hooks.wrap(torch.utils.data.DataLoader, "__init__", functools.partial(_resized, change.loader))


class _PlanInjector:
    """Applies a plan to each model whose parameters an optimizer takes, and completes the script's plans."""

    def __init__(self, change: Intervention) -> None:
        from memfit.recording.module_names import ModuleNames

        self._plan = dict.fromkeys(change.strategies, True)
        self._report = Path(change.models)
        self._names = ModuleNames()
        self._planned: list[tuple[weakref.ref[Any], str]] = []

    def install(self, hooks: "InstalledHooks") -> None:
        """Hook the creation of modules and optimizers, and ``memfit.apply``."""
        import torch
        from torch.nn.modules.module import register_module_module_registration_hook

        from memfit.strategies import apply

        hooks.add(register_module_module_registration_hook(self._names.learn))
        hooks.wrap(torch.nn.Module, "__setstate__", self._copied)
        hooks.wrap(torch.optim.Optimizer, "__init__", self._optimized)
        hooks.wrap(apply, "apply_to_model", self._applied)

    def _copied(self, original: Callable[..., None], module: Any, state: Any) -> None:
        original(module, state)
        self._names.learn_copy(module)

    def _optimized(self, original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in sorted(self._names.outermost(), key=self._names.full_name):
            if any(id(parameter) in trained for parameter in model.parameters()):
                self._apply(model, innermost_line(user_line(sys._getframe(2))))

    def _apply(self, model: Any, optimized_at: str) -> None:
        from memfit.strategies.apply import apply

        try:
            apply(model, self._plan)
        except UsageError:
            return  # it has a plan, or this one does not suit; if no model gets it, the run is like the first
        name = f"{self._names.full_name(model)} (optimizer: {optimized_at})"
        self._report_models([*self._planned, (weakref.ref(model), name)])

    def _applied(self, original: Callable[..., Any], model: Any, plan: "Plan") -> Any:
        """Apply a plan of the script's, and the strategies that it leaves to us."""
        from memfit.strategies.apply import revert

        for entry in list(self._planned):
            ours = entry[0]()
            if ours is not None and model in set(ours.modules()):
                revert(ours)
                self._report_models([other for other in self._planned if other is not entry])
        both = self._completed(plan)
        if both is None:
            return original(model, plan)
        try:
            result = original(model, both)
        except UsageError:  # ours does not suit
            return original(model, plan)
        name = f"{self._names.full_name(model)} (plan: {innermost_line(user_line())})"
        self._report_models([*self._planned, (weakref.ref(model), name)])
        return result

    def _completed(self, plan: "Plan") -> "Plan | None":
        """Return a plan with those of our strategies that it lacks; None if it has them, or they conflict."""
        from memfit.strategies.configuration import configure

        lacking = {name: given for name, given in self._plan.items() if getattr(plan, name) is None}
        try:
            ours = configure(lacking).plan
            return replace(plan, **{name: getattr(ours, name) for name in lacking}) if lacking else None
        except UsageError:
            return None

    def _report_models(self, planned: list[tuple[weakref.ref[Any], str]]) -> None:
        self._planned = planned
        self._report.write_text("".join(f"{name}\n" for _, name in planned))


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
    line, _ = creator(sys._getframe(2))
    if batch_size is not None and line == size.line and kwargs.get("batch_sampler") is None:
        batch_size = size.size
    original(loader, dataset, batch_size, *args, **kwargs)


if __name__ == "__main__":
    main()
