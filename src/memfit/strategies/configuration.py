"""Settings from a dict or a TOML file, under today's names and older ones.

    precision = "bf16"                       the strategy's first field
    gradient_accumulation_steps = 4          a field of one strategy, under its own name
    [checkpointing]                          a strategy's fields
    modules = ["layers.*"]
    fp16 = { loss_scale = 512.0 }            an older name, see older_names.py

Everything that was given is echoed with what it became; two names that contradict each other, and names that
are not known, are errors.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_type_hints

from memfit.errors import FileFormatError, UsageError
from memfit.strategies.legacy_settings import NOTHING, OVER_BATCHES, READERS, Setting
from memfit.strategies.plan import Plan
from memfit.strategies.precision import LossScale
from memfit.strategies.suggestions import unknown

STRATEGIES: dict[str, type] = {name: get_args(kind)[0] for name, kind in get_type_hints(Plan).items()}
"""The fields of a plan, and what they are made of."""

ALIASES = {
    "activation_checkpointing": "checkpointing",
    "gradient_checkpointing": "checkpointing",
    "loss_scale": "precision.loss_scale",
    "master_weights": "precision.master_weights",
    "gradient_accumulation_steps": "accumulation.gradient_accumulation_steps",
    "micro_batch_size": "accumulation.micro_batch_size",
    "global_batch_size": "accumulation.global_batch_size",
    "partial_window": "accumulation.partial_window",
    "gradient_dtype": "accumulation.gradient_dtype",
    "step_in_backward": "optimizer_state.step_in_backward",
    "max_grad_norm": "max_grad_norm",
    "accumulate_grad_batches": "accumulation.gradient_accumulation_steps",  # Lightning
    "accumulative_counts": "accumulation.gradient_accumulation_steps",  # MMEngine
    "mini_steps": "accumulation.gradient_accumulation_steps",  # MindSpore
    "grad_accumulation_step": "accumulation.gradient_accumulation_steps",  # MindSpore
}
"""Names that stand for one thing: a strategy, a field of one, or the engine's ``max_grad_norm``."""

_OVER_BATCHES = ("accumulate_grad_batches", "accumulative_counts", "mini_steps", "grad_accumulation_step")
"""Names of systems that accumulate over a loader's batches."""
_DEEP = 32
"""Levels of dicts and lists that are looked into; people write four."""
_BITS = 64


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a dict or a file said, for ``Engine`` and ``apply``.

    ``str()`` of it is a line for each thing that was given, and what it became.
    """

    plan: Plan = field(default_factory=Plan)
    max_grad_norm: float | None = None
    """Gradients are clipped to it; no strategy, but a part of the job."""
    echo: tuple[tuple[str, str], ...] = ()
    """What was given, and what it became."""

    def __str__(self) -> str:
        width = max((len(given) for given, _ in self.echo), default=0)
        return "\n".join(f"{given:<{width}}  ->  {became}" for given, became in self.echo)

    def clipped_to(self, max_grad_norm: float | None) -> float | None:
        """Return what gradients are clipped to, where the job may say it as well.

        Raises:
            UsageError: it says something else.
        """
        if None not in (self.max_grad_norm, max_grad_norm) and self.max_grad_norm != max_grad_norm:
            raise UsageError(
                f"max_grad_norm={max_grad_norm} and the configuration's {self.max_grad_norm} contradict each "
                "other. Leave one out."
            )
        return self.max_grad_norm if max_grad_norm is None else max_grad_norm

    @classmethod
    def of(cls, given: Any) -> "Configuration":
        """Read what ``Engine`` and ``apply`` take: a plan in any form, or what ``configure`` takes.

        Raises:
            UsageError, FileFormatError: as ``configure``.
        """
        if isinstance(given, Configuration):
            return given
        return configure(given) if isinstance(given, Mapping | str | PathLike) else cls(Plan.of(given))


def configure(given: "Mapping[str, Any] | str | PathLike[str]") -> Configuration:
    """Read settings.

    Args:
        given: a dict of plain values; or the path of a TOML file, or of a network in Caffe's text format
            (``.prototxt``), of which ``mem_param`` is read.

    Raises:
        UsageError: a name is not known (the nearest is named), a value is none of what it can be, or two
            names contradict each other.
        FileFormatError: the file cannot be read.

    >>> print(configure({"fp16": {"loss_scale": 512.0}, "with_cp": True, "gradient_accumulation_steps": 4}))
    fp16                           ->  precision.dtype='fp16'
    fp16.loss_scale=512.0          ->  precision.loss_scale=512.0
    with_cp=True                   ->  checkpointing
    gradient_accumulation_steps=4  ->  accumulation.gradient_accumulation_steps=4
    """
    entries = given if isinstance(given, Mapping) else _file(given)
    _expect_plain(entries, "the configuration", _DEEP)
    settings = [setting for name, value in entries.items() for setting in _read(name, value)]
    chosen = _without_contradictions(settings)
    values: dict[str, dict[str, Any]] = {}
    for target, setting in chosen.items():
        strategy, _, name = target.partition(".")
        if strategy in STRATEGIES:
            scale = _loss_scale(setting) if name == "loss_scale" else None
            value = setting.value if scale is None else asdict(scale)
            values.setdefault(strategy, {}).update({name: value} if name else {})
    plan = Plan(
        **{
            strategy: _made(STRATEGIES[strategy], fields, _given(chosen, strategy))
            for strategy, fields in values.items()
        }
    )
    norm = chosen.get("max_grad_norm")
    echo = tuple(
        (one.given, _became(one)) for one in settings if not one.is_default or chosen[str(one.target)] is one
    )
    return Configuration(plan, None if norm is None else _norm(norm), echo)


def _file(given: str | PathLike[str]) -> Mapping[str, Any]:
    try:
        path = Path(given)
        text = path.read_text(encoding="utf-8")
    except (TypeError, ValueError, OSError) as error:  # UnicodeDecodeError is a ValueError
        if isinstance(error, UnicodeDecodeError):
            raise FileFormatError(f"Cannot read settings from {given}: it is no text ({error}).") from None
        raise UsageError(f"Cannot read settings from {given!r}: {error}. Give a dict or a path.") from None
    if path.suffix == ".prototxt":
        return {"mem_param": text}
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # and numbers of thousands of digits
        raise FileFormatError(f"Cannot read settings from {path}: it is no TOML ({error}).") from None


def _expect_plain(given: Any, name: str, levels: int) -> None:
    """Check that a value is what JSON and TOML can say: whatever else it might do when looked at, it is not.

    Raises:
        UsageError: it is not, or it is nested too deep.
    """
    if not levels:
        raise UsageError(f"{name} is nested more than {_DEEP} levels deep.")
    if isinstance(given, Mapping):
        for key, value in given.items():
            if not isinstance(key, str):
                raise UsageError(f"{name}: the name {key!r} is no string.")
            _expect_plain(value, key, levels - 1)
    elif isinstance(given, list | tuple):
        for value in given:
            _expect_plain(value, name, levels - 1)
    elif not (given is None or isinstance(given, str | int | float)):
        raise UsageError(f"{name} is of type {type(given).__name__}: settings are made of plain values.")
    elif isinstance(given, int) and given.bit_length() > _BITS:
        raise UsageError(f"{name} is a number of {given.bit_length()} bits: no setting is that large.")


# ---- From names to settings -----------------------------------------------------------------------------


def _read(name: str, given: Any) -> Iterator[Setting]:
    target = ALIASES.get(name, name)
    if name in READERS:
        yield from READERS[name](name, given)
    elif target in STRATEGIES:
        yield from _strategy(name, target, given)
    elif name not in ALIASES:
        raise unknown("a setting", name, [*STRATEGIES, *ALIASES, *READERS])
    elif given is None:
        yield Setting(f"{name}=None", None, note=NOTHING)
    else:
        yield _setting(f"{name}={given!r}", target, given, OVER_BATCHES if name in _OVER_BATCHES else "")


def _strategy(name: str, strategy: str, given: Any) -> Iterator[Setting]:
    """Read a strategy's table; or true and false; or a value for its first field."""
    known = [field.name for field in fields(STRATEGIES[strategy])]
    if given is None or given is False:
        yield Setting(f"{name}={given!r}", None, note=NOTHING, denies=strategy if given is False else "")
    elif given is True or given == {}:
        yield Setting(f"{name}={given!r}", strategy)
    elif isinstance(given, Mapping):
        for field, value in given.items():
            if field not in known:
                raise unknown(f"a field of {name}", field, known)
            yield _setting(f"{name}.{field}={value!r}", f"{strategy}.{field}", value)
    else:
        yield _setting(f"{name}={given!r}", f"{strategy}.{known[0]}", given)


def _setting(given: str, target: str, value: Any, note: str = "") -> Setting:
    return Setting(given, target, tuple(value) if isinstance(value, list) else value, note)


def _without_contradictions(settings: Sequence[Setting]) -> dict[str, Setting]:
    """Return what is set, once each: defaults of older systems give way to what was said."""
    chosen: dict[str, Setting] = {}
    for setting in sorted(settings, key=lambda setting: setting.is_default):
        if setting.target is None:
            continue
        other = chosen.setdefault(setting.target, setting)
        if not setting.is_default and _compared(other) != _compared(setting):
            raise UsageError(
                f"{other.given} and {setting.given} contradict each other: both are {setting.target}. "
                "Leave one out."
            )
    for setting in settings:
        for target, other in chosen.items():
            if setting.denies in (target, target.partition(".")[0]) and setting.value in (None, other.value):
                raise UsageError(f"{setting.given} and {other.given} contradict each other. Leave one out.")
    return chosen


def _compared(setting: Setting) -> Any:
    """Return a value that equals another's if they mean the same; True and 1 do not."""
    if setting.target == "precision.loss_scale":
        return _loss_scale(setting)
    return type(setting.value) is bool, setting.value


# ---- From settings to a plan ----------------------------------------------------------------------------


def _made(strategy: type, values: dict[str, Any], given: str) -> Any:
    """Make a strategy's settings.

    Raises:
        UsageError: the strategy refuses a value.
    """
    try:
        return strategy(**values)
    except UsageError as error:
        raise UsageError(f"{str(error).rstrip('.')}. Given: {given}.") from None


def _given(chosen: Mapping[str, Setting], strategy: str) -> str:
    return ", ".join(
        setting.given for target, setting in chosen.items() if target.partition(".")[0] == strategy
    )


def _loss_scale(setting: Setting) -> LossScale | None:
    return None if setting.value is None else LossScale.of(setting.value)


def _norm(setting: Setting) -> float:
    value = setting.value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UsageError(f"{setting.given}: gradients are clipped to a norm, a number of more than 0.")
    return float(value)


def _became(setting: Setting) -> str:
    if setting.target is None:
        return f"nothing to set: {setting.note}"
    value = "" if setting.value is None else f"={setting.value!r}"
    return f"{setting.target}{value}" + (f" ({setting.note})" if setting.note else "")
