"""Settings of ``memfit.arena``, as a configuration carries them."""

from dataclasses import dataclass

from memfit.strategies.setting_checks import check_setting_types


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSettings:
    """Which steps an arena places at planned offsets, and what it keeps readable.

    They change no result and no model, so they are no strategy of a plan, and a run may resume with others.

    Raises:
        UsageError: a value has another type.

    >>> ArenaSettings(optimize_test=False, exclude=("fc1", "layers.*")).exclude
    ('fc1', 'layers.*')
    """

    optimize_train: bool = True
    """Whether training steps are placed."""
    optimize_test: bool = True
    """Whether evaluation steps are placed."""
    exclude: tuple[str, ...] = ()
    """Modules whose outputs stay readable until the next step begins, by name, pattern or class
    (``strategies/mechanisms/module_patterns.py``); or parameters and buffers, by name."""

    def __post_init__(self) -> None:
        """Check types."""
        check_setting_types(self, "arena")
