"""Give a script's optimizers their part of an injected plan.

They get it when the script first calls a module after it created them: schedulers and wrappers of libraries
exist by then, and no gradient does.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from memfit.errors import UsageError
from memfit.injection.injection_files import NEVER_CALLED
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.optimizer_accessors import parameters_of
from memfit.strategies.apply import apply_to_optimizer
from memfit.strategies.optimizer_state import OptimizerState

_MODULE = Patch("torch.nn.modules.module:Module", "__call__", why="change the state of its optimizer")

_OWN_SETTINGS = "the script applies optimizer_state itself. Change it there."
_SHARED = (
    "step_in_backward: two optimizers of the script share parameters, and the second would find no "
    "gradients. Leave out step_in_backward."
)


class OptimizerStateInjector:
    """Applies ``OptimizerState`` to optimizers.

    Args:
        settings: what to apply.
        report: called with why they do not suit the script, whenever that changes; empty if they do.
        strict: whether settings that were applied, and turn out not to suit the script, raise a
            ``UsageError`` in it: it must not go on, because its updates would be others.
    """

    def __init__(
        self, settings: OptimizerState, report: Callable[[str], None], *, strict: bool = False
    ) -> None:
        self.settings, self._report, self._strict = settings, report, strict
        self._refusal = ""
        self._optimizers: list[weakref.ref[Any]] = []
        """All of the script."""
        self._waiting: list[tuple[weakref.ref[Any], list[weakref.ref[Any]]]] = []
        """Optimizers, each with its models."""
        self._engines: list[weakref.ref[Any]] = []
        """Models whose engine carries out the settings."""
        self._hooks = InstalledHooks()

    def created(self, optimizer: Any, models: Iterable[Any]) -> None:
        """Wait with an optimizer of the script until it calls a module, if there are models to be planned."""
        if optimizer is None:
            return
        others = [each for reference in self._optimizers if (each := reference()) is not None]
        taken = {id(parameter) for each in others for parameter in parameters_of(each)}
        if self.settings.step_in_backward and any(id(each) in taken for each in parameters_of(optimizer)):
            self._refuse(_SHARED)
        self._optimizers.append(weakref.ref(optimizer))
        if not models:
            return
        if not self._waiting:
            self._hooks = InstalledHooks()
            self._hooks.wrap(_MODULE, "__call__", self._called)
        self._waiting.append((weakref.ref(optimizer), list(map(weakref.ref, models))))
        self._report(self._refusal or NEVER_CALLED)

    def leave_to_engine(self, model: Any) -> None:
        """Leave the optimizer of a model to the engine that has got the settings."""
        self._engines.append(weakref.ref(model))

    def expect_no_other(self, settings: OptimizerState | None) -> None:
        """Refuse a script whose own plan has other settings."""
        if settings is not None and settings is not self.settings:
            self._refuse(_OWN_SETTINGS)

    def apply(self) -> None:
        """Apply the settings to the optimizers that wait for them."""
        self._hooks.remove()
        waiting, self._waiting = self._waiting, []
        for reference, models in waiting:
            optimizer = reference()
            alive = [model for each in models if (model := each()) is not None]
            if optimizer is None or not alive or any(map(self._has_engine, alive)):
                continue
            try:
                apply_to_optimizer(optimizer, alive, self.settings, refuse=self._refuse)
            except UsageError as error:  # they were not applied
                self._refusal = self._refusal or str(error)
        self._report(self._refusal)

    def _has_engine(self, model: Any) -> bool:
        return any(engine() in set(model.modules()) for engine in self._engines)

    def _refuse(self, why: str) -> None:
        """Report why the settings do not suit the script; the first reason stays."""
        self._refusal = self._refusal or why
        self._report(self._refusal)
        if self._strict:
            raise UsageError(why)

    def _called(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        self.apply()
        return original(module, *args, **kwargs)
