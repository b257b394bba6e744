"""The script's own options that memory depends on, read from argparse and click when they parse ``sys.argv``.

Where neither has one, words of the command line such as ``--batch_size=64`` (nanoGPT) or
``trainer.batch_size=64`` (Hydra, OmegaConf) are taken as they are. Only options whose name is in the table
are kept: their names, and numbers or whether they are on.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.records import ScriptOption, ScriptOptionPurpose

_ARGPARSE = Patch("argparse:ArgumentParser", "parse_known_args", why="learn the script's options")
_CLICK = Patch("click.core:Command", "parse_args", why="learn the script's options")

_NAMES = {
    ScriptOptionPurpose.BATCH_SIZE: (
        "per-device-train-batch-size",
        "train-batch-size",
        "micro-batch-size",
        "batch-size",
        "batch",
        "bs",
        "b",
    ),
    ScriptOptionPurpose.ACCUMULATION: (
        "gradient-accumulation-steps",
        "grad-accumulation-steps",
        "grad-accum-steps",
        "accumulation-steps",
        "accum-steps",
        "accum-iter",
        "accum-freq",
    ),
    ScriptOptionPurpose.PARTS: ("parts-per-batch",),
    ScriptOptionPurpose.CHECKPOINTING: (
        "gradient-checkpointing",
        "grad-checkpointing",
        "activation-checkpointing",
        "gradient-checkpoint",
        "grad-checkpoint",
        "checkpoint-activations",
    ),
    ScriptOptionPurpose.LOW_PRECISION: ("bf16", "mixed-precision", "amp", "fp16"),
}
"""Names without dashes in front, with ``_`` as ``-``; of one purpose, the most specific or gentlest first."""
_KNOWN = {name: purpose for purpose, names in _NAMES.items() for name in names}
_RANK = {name: rank for rank, name in enumerate(_KNOWN)}
_NUMBERS = (ScriptOptionPurpose.BATCH_SIZE, ScriptOptionPurpose.ACCUMULATION, ScriptOptionPurpose.PARTS)
_HELD_OUT = {"eval", "evaluation", "test", "val", "valid", "validation"}
"""Groups of settings that are not those of training."""
_LOW = ("bf16", "bfloat16", "fp16", "float16")
"""Choices of an option that mean low precision."""


class ScriptOptionCollector:
    """Collects the options while the script parses them."""

    def __init__(self) -> None:
        self._hooks = InstalledHooks()
        self._found: dict[str, ScriptOption] = {}  # by name, as in the table

    def install(self) -> None:
        """Follow the parsers that the script imports."""
        # parse_args and the parsers of transformers, which derive from this class, end up here.
        self._hooks.wrap_when_imported(_ARGPARSE, parse_known_args=self._argparse)
        self._hooks.wrap_when_imported(_CLICK, parse_args=self._click)

    def found(self) -> tuple[ScriptOption, ...]:
        """Return the options in the order of the table; of ``name=value`` words, those that no parser has."""
        parsed = {option.purpose for option in self._found.values()}
        assigned = {name: one for name, one in _assignments(sys.argv[1:]) if one.purpose not in parsed}
        every = assigned | self._found
        return tuple(every[name] for name in sorted(every, key=_RANK.__getitem__))

    def _argparse(self, original: Callable[..., Any], parser: Any, args: Any = None, *more: Any) -> Any:
        given = None if args is None else list(args)
        result = original(parser, given, *more)
        if _from_command_line(given):
            for action in parser._actions:
                value = getattr(result[0], action.dest, None)
                if value is None and action.const is True:
                    value = False  # a switch that the command line does not mention
                plain = action.nargs in (0, "?")  # the option alone turns it on
                self._keep(action.option_strings, value, plain=plain, choices=action.choices or ())
        return result

    def _click(self, original: Callable[..., Any], command: Any, context: Any, args: Any) -> Any:
        given = list(args)
        rest = original(command, context, args)
        if _from_command_line(given):
            for option in command.params:
                choices = getattr(option.type, "choices", ())
                plain = getattr(option, "is_flag", False)
                self._keep(option.opts, context.params.get(option.name), plain=plain, choices=choices)
        return rest

    def _keep(
        self, spellings: Iterable[str], value: object, *, plain: bool, choices: Collection[Any]
    ) -> None:
        for spelling in spellings:
            name = spelling.lstrip("-").replace("_", "-").lower()
            if spelling.startswith("-") and name in _KNOWN:
                option = ScriptOption(_KNOWN[name], (spelling,), 0)
                if (known := _with_value(option, value, plain=plain, choices=choices)) is not None:
                    self._found[name] = known
                    return


def _assignments(words: Iterable[str]) -> Iterator[tuple[str, ScriptOption]]:
    """Yield the numbers that ``name=value`` words set, by the name in the table: a dotted one's last part."""
    for word in words:
        spelling, _, value = word.partition("=")
        *groups, last = spelling.lstrip("-+").replace("_", "-").lower().split(".")
        purpose = _KNOWN.get(last)
        if purpose in _NUMBERS and value.isdecimal() and int(value) and not _HELD_OUT.intersection(groups):
            yield last, ScriptOption(purpose, (f"{spelling}=",), int(value))


def _from_command_line(given: list[str] | None) -> bool:
    """Return whether arguments are from the command line, perhaps after another parser has taken its own."""
    return given is None or set(given) <= set(sys.argv[1:])


def _with_value(
    option: ScriptOption, value: object, *, plain: bool, choices: Collection[Any]
) -> ScriptOption | None:
    """Return an option with its value; None if memfit does not know how to set it."""
    if option.purpose in _NUMBERS:
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return replace(option, value=value)
        return None
    if isinstance(value, bool):
        words = option.words if plain else (*option.words, "True")
        return replace(option, words=words, value=int(value))
    low = next((choice for choice in _LOW if choice in choices), None)
    if low is None:
        return None
    return replace(option, words=(*option.words, low), value=int(str(value) in _LOW))
