"""Settings from a dict or a file, under memfit's names and those of older systems.

    precision = "bf16"                       the strategy's first field
    batches_per_update = 4                   a field of one strategy, under its own name
    "plan": {...}                            of a file that memfit plan wrote
    [checkpointing]                          a strategy's fields
    modules = ["layers.*"]
    arena = { exclude = ["fc1"] }            the settings of memfit.arena
    fp16 = { loss_scale = 512.0 }            an older name, see translate_other_frameworks_settings.py

Every setting is echoed with the plan's field that it became. Contradictory settings and unknown names are
errors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_type_hints

from memfit.errors import FileFormatError, UsageError
from memfit.strategies.arena_settings import ArenaSettings
from memfit.strategies.plan import Plan
from memfit.strategies.precision import LossScale
from memfit.strategies.read_trainer_settings import LIGHTNING_PRECISION, TRAINER_READERS
from memfit.strategies.setting_checks import unknown_name_error
from memfit.strategies.settings_files import read_settings_file
from memfit.strategies.translate_other_frameworks_settings import NOTHING, TranslatedSetting
from memfit.strategies.translate_other_frameworks_settings import READERS as LEGACY_READERS

READERS = {**LEGACY_READERS, **TRAINER_READERS}
"""Names of older systems and of other trainers, and how each is read."""
TABLES: dict[str, type] = {
    **{name: get_args(kind)[0] for name, kind in get_type_hints(Plan).items()},
    "arena": ArenaSettings,
}
"""The settings that have fields of their own: a plan's, and the arena's; and their classes."""

ALIASES = {
    "activation_checkpointing": "checkpointing",
    "gradient_checkpointing": "checkpointing",
    "loss_scale": "precision.loss_scale",
    "master_weights": "precision.master_weights",
    "parts_per_batch": "accumulation.parts_per_batch",
    "batches_per_update": "accumulation.batches_per_update",
    "micro_batch_size": "accumulation.micro_batch_size",
    "global_batch_size": "accumulation.global_batch_size",
    "remainder": "accumulation.remainder",
    "gradient_dtype": "accumulation.gradient_dtype",
    "step_in_backward": "optimizer_state.step_in_backward",
    "optimize_train": "arena.optimize_train",
    "optimize_test": "arena.optimize_test",
}
"""Names with one meaning: a strategy, or a field of one or of the arena."""

_MAX_DEPTH = 32
"""Levels of dicts and lists that are read; real settings have about four."""
_MAX_BITS = 64


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings of a dict or a file, for ``Engine`` and ``apply``.

    ``str()`` of it has a line for each setting given: its name, its value, and the field that it became.
    """

    plan: Plan = field(default_factory=Plan)
    max_grad_norm: float | None = None
    """The norm to which gradients are clipped; part of the job rather than of a strategy."""
    arena: ArenaSettings | None = None
    """For ``memfit.arena``; with them, ``Engine`` trains in an arena."""
    echo: tuple[tuple[str, str], ...] = ()
    """Each setting as given, and the field that it became."""

    def __str__(self) -> str:
        width = max((len(given) for given, _ in self.echo), default=0)
        return "\n".join(f"{given:<{width}}  ->  {became}" for given, became in self.echo)

    def clipped_to(self, max_grad_norm: float | None) -> float | None:
        """Return the norm to which gradients are clipped: the configuration's or the job's.

        Raises:
            UsageError: both are set, and differ.
        """
        if None not in (self.max_grad_norm, max_grad_norm) and self.max_grad_norm != max_grad_norm:
            raise UsageError(
                f"max_grad_norm={max_grad_norm} contradicts max_grad_norm={self.max_grad_norm} in the "
                "configuration. Leave out one of the two."
            )
        return self.max_grad_norm if max_grad_norm is None else max_grad_norm

    @classmethod
    def of(cls, given: Any) -> "Configuration":
        """Read the ``plan`` argument of ``Engine`` and ``apply``: a plan in any form, a dict or a path.

        Raises:
            UsageError, FileFormatError: as for ``configure``.
        """
        if isinstance(given, Configuration):
            return given
        return configure(given) if isinstance(given, Mapping | str | PathLike) else cls(Plan.of(given))


def configure(given: "Mapping[str, Any] | str | PathLike[str]") -> Configuration:
    """Read settings from a dict or a file.

    Args:
        given: a dict of plain values, or the path of a file of them: TOML, JSON (which may be a plan file),
            a network in Caffe's text format (``.prototxt``), from which ``mem_param`` is read, or a Python
            file that assigns literals (``.py``), such as a configuration of MMEngine, which is never run.

    Raises:
        UsageError: a name is unknown (the message suggests the nearest), a value is invalid, or two settings
            contradict each other.
        FileFormatError: the file cannot be read.

    >>> print(configure({"fp16": {"loss_scale": 512.0}, "with_cp": True, "gradient_accumulation_steps": 4}))
    fp16                           ->  precision.dtype='fp16'
    fp16.loss_scale=512.0          ->  precision.loss_scale=512.0
    with_cp=True                   ->  checkpointing.blocks='backbone'
    gradient_accumulation_steps=4  ->  accumulation.batches_per_update=4
    gradient_accumulation_steps=4  ->  accumulation.remainder='step' (the way of HuggingFace's Trainer)
    """
    entries = given if isinstance(given, Mapping) else _file(given)
    _expect_plain(entries, "the configuration", _MAX_DEPTH)
    settings = _with_effect([setting for name, value in entries.items() for setting in _read(name, value)])
    chosen = _without_contradictions(settings)
    values: dict[str, dict[str, Any]] = {}
    for target, setting in chosen.items():
        strategy, _, name = target.partition(".")
        if strategy in TABLES:
            scale = _loss_scale(setting) if name == "loss_scale" else None
            value = setting.value if scale is None else asdict(scale)
            values.setdefault(strategy, {}).update({name: value} if name else {})
    built = {name: _build(TABLES[name], fields, _given_for(chosen, name)) for name, fields in values.items()}
    arena = built.pop("arena", None)
    norm = chosen.get("max_grad_norm")
    echo = tuple(
        (setting.given, _describe_result(setting))
        for setting in settings
        if not setting.is_default or chosen[str(setting.target)] is setting
    )
    return Configuration(Plan(**built), None if norm is None else _norm(norm), arena, echo)


def _file(given: str | PathLike[str]) -> Mapping[str, Any]:
    instead = "Pass a dict of settings, or the path of a file."
    try:
        return read_settings_file(Path(given), {*TABLES, *ALIASES, *READERS})
    except FileFormatError as error:
        if Path(given).exists():
            raise
        raise UsageError(f"{error} {instead}") from None
    except (TypeError, ValueError) as error:  # not a path
        raise UsageError(f"Cannot read settings from {given!r}: {error}. {instead}") from None


def _expect_plain(given: Any, name: str, levels: int) -> None:
    """Check that a value consists of the types that JSON and TOML have: objects may run code when read."""
    if not levels:
        raise UsageError(f"{name} is nested more than {_MAX_DEPTH} levels deep.")
    if isinstance(given, Mapping):
        for key, value in given.items():
            if not isinstance(key, str):
                raise UsageError(f"{name}: the key {key!r} must be a string.")
            _expect_plain(value, key, levels - 1)
    elif isinstance(given, list | tuple):
        for value in given:
            _expect_plain(value, name, levels - 1)
    elif not (given is None or isinstance(given, str | int | float)):
        raise UsageError(
            f"{name} must be a string, a number, a boolean, None, a list or a dict, not "
            f"{type(given).__name__}."
        )
    elif isinstance(given, int) and given.bit_length() > _MAX_BITS:
        raise UsageError(
            f"{name} is an integer of {given.bit_length()} bits. Integers must have at most {_MAX_BITS} bits."
        )


# ---- From names to settings -----------------------------------------------------------------------------


def _read(name: str, given: Any) -> Iterator[TranslatedSetting]:
    target = ALIASES.get(name, name)
    if name in READERS:
        yield from READERS[name](name, given)
    elif target in TABLES:
        yield from _table(name, target, given)
    elif name not in ALIASES:
        what = "a setting of memory or precision that memfit reads"
        raise unknown_name_error(what, name, [*TABLES, *ALIASES, *READERS])
    elif given is None:
        yield TranslatedSetting(f"{name}=None", None, note=NOTHING)
    else:
        yield _setting(f"{name}={given!r}", target, given)


def _table(name: str, table: str, given: Any) -> Iterator[TranslatedSetting]:
    """Read the fields of a strategy or of the arena, true or false, or a value for the first field."""
    known = [field.name for field in fields(TABLES[table])]
    if table == "precision" and isinstance(given, str | int) and type(given) is not bool:
        given = LIGHTNING_PRECISION.get(given, given)
    if given is None or given is False:
        yield TranslatedSetting(
            f"{name}={given!r}", None, note=NOTHING, denies=table if given is False else ""
        )
    elif given is True or given == {}:
        yield TranslatedSetting(f"{name}={given!r}", table)
    elif isinstance(given, Mapping):
        for field, value in given.items():
            if field not in known:
                raise unknown_name_error(f"a field of {name}", field, known)
            yield _setting(f"{name}.{field}={value!r}", f"{table}.{field}", value)
    elif fields(TABLES[table])[0].kw_only:
        raise UsageError(
            f"{name}={given!r} does not say which field it sets. Name it, for example {known[0]}={given!r} "
            f"or {known[1]}={given!r}."
        )
    else:
        yield _setting(f"{name}={given!r}", f"{table}.{known[0]}", given)


def _setting(given: str, target: str, value: Any) -> TranslatedSetting:
    if target == "arena.exclude" and isinstance(value, str):
        value = (value,)
    return TranslatedSetting(given, target, tuple(value) if isinstance(value, list) else value)


def _with_effect(settings: Sequence[TranslatedSetting]) -> list[TranslatedSetting]:
    """Set nothing for settings that refine a strategy for which no other setting asks."""
    asked = {_table_of(setting) for setting in settings if not setting.only_refines}
    return [
        replace(setting, target=None, note=f"no setting switches {_table_of(setting)} on")
        if setting.only_refines and _table_of(setting) not in asked
        else setting
        for setting in settings
    ]


def _table_of(setting: TranslatedSetting) -> str:
    return (setting.target or "").partition(".")[0]


def _without_contradictions(settings: Sequence[TranslatedSetting]) -> dict[str, TranslatedSetting]:
    """Return the settings by target: explicit ones override defaults of older systems."""
    chosen: dict[str, TranslatedSetting] = {}
    for setting in sorted(settings, key=lambda setting: setting.is_default):
        if setting.target is None:
            continue
        other = chosen.setdefault(setting.target, setting)
        if other.is_default == setting.is_default and _compared(other) != _compared(setting):
            raise UsageError(
                f"{other.given} and {setting.given} contradict each other: both set {setting.target}. "
                "Leave out one of the two."
            )
    for setting in settings:
        for target, other in chosen.items():
            if setting.denies in (target, target.partition(".")[0]) and setting.value in (None, other.value):
                raise UsageError(
                    f"{setting.given} and {other.given} contradict each other. Leave out one of the two."
                )
    return chosen


def _compared(setting: TranslatedSetting) -> Any:
    """Return a value to compare: equal for settings of the same meaning; True and 1 differ."""
    if setting.target == "precision.loss_scale":
        return _loss_scale(setting)
    return type(setting.value) is bool, setting.value


# ---- From settings to a plan ----------------------------------------------------------------------------


def _build(strategy: type, values: dict[str, Any], given: str) -> Any:
    """Return a strategy's settings."""
    try:
        return strategy(**values)
    except UsageError as error:
        raise UsageError(f"{str(error).rstrip('.')}. The configuration sets {given}.") from None


def _given_for(chosen: Mapping[str, TranslatedSetting], strategy: str) -> str:
    return ", ".join(
        setting.given for target, setting in chosen.items() if target.partition(".")[0] == strategy
    )


def _loss_scale(setting: TranslatedSetting) -> LossScale | None:
    return None if setting.value is None else LossScale.of(setting.value)


def _norm(setting: TranslatedSetting) -> float:
    value = setting.value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UsageError(
            f"{setting.given} is invalid: the maximum norm of the gradients must be a number above 0."
        )
    return float(value)


def _describe_result(setting: TranslatedSetting) -> str:
    if setting.target is None:
        return f"nothing to set: {setting.note}"
    value = "" if setting.value is None else f"={setting.value!r}"
    return f"{setting.target}{value}" + (f" ({setting.note})" if setting.note else "")
