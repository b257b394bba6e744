"""What is checked before the steps of a script's optimizers: refusals that it has caught, and layers.

A script that catches a refusal, as an error of a bad batch, would train without that batch.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.errors import UsageError
from memfit.patching.patches import Patch
from memfit.strategies.mechanisms.independent_samples import expect_independent_layers
from memfit.user_lines import line_of_error, user_line_with_package_line

if TYPE_CHECKING:
    from memfit.patching.installed_hooks import InstalledHooks

_WHY = "know the refusals that a script catches"
_RAISED = Patch("memfit.errors:UsageError", "__init__", why=_WHY)
_DROPPED = Patch("memfit.errors:UsageError", "__del__", why=_WHY, adds=True)


class ChecksBeforeSteps:
    """Checks a script before each step of an optimizer.

    Args:
        caught: called with a refusal that the script has caught, and its line, before each step after that.
        refuse: called with why a model's batches cannot be divided, and its name, before the first step.
        sliced: the models whose batches are divided, and their names.
    """

    def __init__(
        self,
        caught: Callable[[str, str], None],
        refuse: Callable[[str, str], None],
        sliced: Iterable[tuple[weakref.ref[Any], str]],
    ) -> None:
        self._caught, self._refuse, self._sliced = caught, refuse, sliced
        self._alive: weakref.WeakSet[BaseException] = weakref.WeakSet()  # a frame of an error keeps tensors
        self._refusals: list[tuple[str, str]] = []
        self._has_stepped = False

    def install(self, hooks: "InstalledHooks") -> None:
        """Hook steps, and memfit's errors."""

        def dropped(error: BaseException) -> None:
            self._note(error)

        hooks.call_after(_RAISED, "__init__", self._alive.add)
        hooks.replace(_DROPPED, "__del__", lambda _: dropped)
        hooks.on_removal(register_optimizer_step_pre_hook(self._before_step).remove)

    def _before_step(self, *_: Any) -> None:
        for error in self._alive:
            self._note(error)
        if self._refusals:
            self._caught(*self._refusals[0])
        if self._has_stepped:
            return
        self._has_stepped = True
        for reference, name in self._sliced:
            try:
                if (model := reference()) is not None:
                    expect_independent_layers(model)
            except UsageError as error:
                self._refuse(str(error), name)

    def _note(self, error: BaseException) -> None:
        """Note an error that the script or a library has caught: memfit itself tries some things."""
        trace = error.__traceback__
        if trace is not None and user_line_with_package_line(
            [(trace.tb_frame.f_code.co_filename, trace.tb_lineno)]
        ):
            self._refusals.append((str(error), line_of_error(error)))
