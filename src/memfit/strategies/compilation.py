"""Settings of what torch.compile makes of a model: the share of its activations that a graph keeps.

    1.0     what takes the least time: the default of PyTorch
    0.5     half of that, beyond the inputs: the rest is recomputed in the backward
    0.0     the inputs only

PyTorch's partitioner (``torch._functorch.partitioners``) divides each graph into a forward and a backward,
and solves for what to keep between the two. A lower share keeps less, but its peak may be higher: a backward
that recomputes everything first holds everything.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from memfit.errors import UsageError
from memfit.strategies.setting_checks import check_setting_types
from memfit.user_lines import warn_user

_SETTING = "activation_memory_budget"


@dataclass(frozen=True, slots=True)
class Compilation:
    """Settings of what torch.compile makes of a model.

    They are settings of the process: they count for all code that is compiled until the undo.

    Raises:
        UsageError: a value is invalid.

    Example:
        >>> Compilation(activation_memory_budget=0.5)
        Compilation(activation_memory_budget=0.5)
    """

    activation_memory_budget: float = 1.0
    """Share of the activations that each graph keeps, between 0 and 1. PyTorch's setting of this name, which
    is private (``torch._functorch.config``)."""

    def __post_init__(self) -> None:
        """Check."""
        check_setting_types(self, "compilation")
        if not 0 <= self.activation_memory_budget <= 1:
            raise UsageError(
                f"compilation: '{_SETTING}' must be between 0 and 1, not {self.activation_memory_budget!r}."
            )

    def apply(self, _model: nn.Module) -> Callable[[], None]:
        """Set it for what is compiled from now on, and return the undo.

        Raises:
            UsageError: this PyTorch does not have the setting.
        """
        from torch._functorch import config

        if not hasattr(config, _SETTING):
            raise UsageError(
                f"compilation: this PyTorch has no torch._functorch.config.{_SETTING}. Use another version "
                "of PyTorch, or leave out compilation."
            )
        if _has_compiled():
            warn_user(
                "torch.compile has compiled code before this plan was applied, and keeps it as it is. Apply "
                "the plan before the first call of the model, or call torch._dynamo.reset()."
            )
        before = config.activation_memory_budget
        config.activation_memory_budget = self.activation_memory_budget

        def revert() -> None:
            config.activation_memory_budget = before

        return revert


def _has_compiled() -> bool:
    """Return whether torch.compile has compiled code in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0
