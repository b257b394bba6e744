"""An engine's updates and validation batches, as steps of an arena.

settings of the arena    arena open on the model's device    the engine
─────────────────────    ────────────────────────────────    ───────────────────────────────────────────────
none                     any, or none                        leaves the arena to the script
given                    of the same settings                uses it
given                    of other settings                   refuses it, unless an engine opened it
given                    none                                opens one; on a GPU it is too late, and an error
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, finalize

from torch import nn

from memfit.errors import UsageError
from memfit.strategies.arena_settings import ArenaSettings
from memfit.strategies.mechanisms.inspect_tensors import tensors_in_object
from memfit.strategies.precision import device_type_of_model
from memfit.user_lines import warn_user

if TYPE_CHECKING:
    from memfit.arenas.arena import Arena


class ArenaSteps:
    """The steps of one engine in an arena; without an arena, they are steps like any others.

    Args:
        settings: of the arena; None for no arena.
        model: the engine's, which has the modules that are excluded by name.

    Raises:
        UsageError: there is no arena that can be used, or the model lacks an excluded name.
    """

    def __init__(self, settings: ArenaSettings | None, model: nn.Module) -> None:
        self.arena: Arena | None = None
        self._label: tuple[str, ...] = ()
        if settings is None:
            return
        self._shared = _arena(settings, device_type_of_model(model))
        self.arena = self._shared.arena
        self.arena.exclude_from(model)
        self._shared.engines += 1
        if self._shared.engines > 1:  # its steps may allocate otherwise, for batches of the same shapes
            self._label = (f"engine {self._shared.engines}",)

    def train(self, batches: list[Any], *labels: str) -> AbstractContextManager[None]:
        """Return the context of an update.

        Args:
            batches: all that the update is made from.
            labels: tell it apart from updates that allocate otherwise, for batches of the same shapes.
        """
        if self.arena is None or self.arena.is_in_step:  # the script's own step may contain several updates
            return nullcontext()
        return self.arena.train(*self._label, *labels, *map(_shown, batches))

    def test(self, batch: Any) -> AbstractContextManager[None]:
        """Return the context of the evaluation of a batch."""
        if self.arena is None or self.arena.is_in_step:
            return nullcontext()
        return self.arena.test(*self._label, _shown(batch))

    def abandon(self, *, restarts: bool = False) -> None:
        """Learn nothing from the current step, as ``Arena.abandon_step``."""
        if self.arena is not None:
            self.arena.abandon_step(restarts=restarts)


class _SharedArena:
    """An arena, and how many engines have used it; closed with the last of them if an engine opened it."""

    def __init__(self, arena: "Arena", *, is_own: bool) -> None:
        self.arena, self.is_own = arena, is_own
        self.engines = 0
        if is_own:
            finalize(self, arena.close).atexit = False


_shared: WeakValueDictionary[str, _SharedArena] = WeakValueDictionary()  # by device, while an engine uses it


def _arena(settings: ArenaSettings, device: str) -> _SharedArena:
    """Return the arena that is open on a device, or open one."""
    from memfit.arenas.open_arena import arena, current_arena

    found, shared = current_arena(device), _shared.get(device)
    if shared is not None and shared.arena is not found:
        shared = None
    if found is not None and found.settings == settings:
        shared = shared or _SharedArena(found, is_own=False)
    elif found is not None and not (shared is not None and shared.is_own):
        raise UsageError(
            f"The arena that is open on this device has {found.settings}, but the engine's configuration has "
            f"{settings}. Create the arena from the same configuration: memfit.arena(configuration)."
        )
    elif device == "cuda" and (settings.optimize_train or settings.optimize_test):
        raise UsageError(
            "The engine's configuration asks for an arena, but none is open, and CUDA is already in use. "
            "Create it at the start of the script, before anything is moved to the GPU: "
            "arena = memfit.arena(configuration)."
        )
    else:
        if found is not None:
            warn_user(
                f"Another engine opened an arena with {found.settings}; this engine's configuration has "
                f"{settings}. memfit closes the first arena: from here on, that engine trains without one."
            )
        shared = _SharedArena(arena(settings, device=device), is_own=True)
    _shared[device] = shared
    return shared


def _shown(batch: Any) -> Any:
    """Return what shows a batch's shapes: its tensors, wherever they are, and no numbers that vary."""
    return tensors_in_object(batch) or batch
