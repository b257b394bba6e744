"""Modules of a model, selected by name, pattern or class.

    layers.3            the module of that name
    layers.*            a star matches anything but a dot: layers.0, layers.1, not layers.0.mlp
    **.mlp              two stars match anything: layers.0.mlp, layers.1.mlp
    TransformerBlock    every module of that class

Names are those of ``model.named_modules()``, without the ``_orig_mod`` that ``torch.compile`` inserts: a
compiled module is found under the name of the original.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import nn

from memfit.errors import UsageError

COMPILED = "_orig_mod"
"""torch.compile's name for the module that it wraps (torch/_dynamo/eval_frame.py, OptimizedModule)."""
_STARS = {"**": ".*", "*": "[^.]*", "?": "[^.]"}


def modules_named(model: nn.Module, patterns: str | Sequence[str], what: str) -> dict[str, nn.Module]:
    """Return the modules that patterns select, in the model's order.

    Args:
        model: searched without the model itself, which has no name.
        patterns: one or several, as in the module docstring.
        what: the setting that they belong to, for the message.
    """
    known = dict(_named(model))
    found: set[str] = set()
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        name = _expression(pattern)
        matching = {
            known_name
            for known_name, module in known.items()
            if name.fullmatch(known_name) or class_name(module) == pattern
        }
        if not matching:
            classes = {class_name(module) for module in known.values()}
            near = difflib.get_close_matches(pattern, [*known, *sorted(classes)], n=3, cutoff=0.4)
            raise UsageError(
                f"{what}: no module of {class_name(model)} has the name or class {pattern!r}. "
                + (
                    f"Nearest: {', '.join(near)}."
                    if near
                    else f"Its first modules are {', '.join(list(known)[:5])}."
                )
            )
        found |= matching
    return {name: module for name, module in known.items() if name in found}


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that a model repeats: its outermost lists of at least two modules of one class.

    Empty if it has none. Single operations, such as a list of Linear, are not blocks: blocks have submodules.
    """
    found: dict[str, nn.Module] = {}
    for name, module in [("", module_without_compile_wrapper(model)), *_named(model)]:
        inside = module_without_compile_wrapper(module)
        if not isinstance(inside, nn.ModuleList | nn.Sequential) or name.startswith(
            tuple(f"{n}." for n in found)
        ):
            continue
        named = {f"{name}.{key}".lstrip("."): child for key, child in inside.named_children()}
        for _, run in groupby(named.items(), key=lambda item: class_name(item[1])):
            blocks = dict(run)
            if len(blocks) > 1 and all(
                any(module_without_compile_wrapper(block).children()) for block in blocks.values()
            ):
                found |= blocks
    return found


def backbone_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the residual blocks of a detector's backbone, as MMDetection's ``with_cp`` means them.

    The backbone is the module of that name; without one, the model itself. Residual blocks are those whose
    class has an ``expansion``, as those of torchvision, MMDetection and timm have; without any, the blocks
    that the backbone repeats.
    """
    parts = {"": model} | dict(_named(model))
    prefix = next((name for name in parts if name.rpartition(".")[2] == "backbone"), "")
    inside = {name: part for name, part in parts.items() if name.startswith(f"{prefix}.") or not prefix}
    residual = {
        name: part
        for name, part in inside.items()
        if hasattr(type(module_without_compile_wrapper(part)), "expansion")
    }
    if residual:
        return residual
    found = repeated_blocks(parts[prefix])
    return {f"{prefix}.{name}".lstrip("."): block for name, block in found.items()}


def module_without_compile_wrapper(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile wrapped; the module itself if it is not compiled."""
    inside = getattr(module, COMPILED, module)
    return inside if isinstance(inside, nn.Module) else module


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class; of the original, if torch.compile wrapped it."""
    return type(module_without_compile_wrapper(module)).__name__


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module below the model with its name; a compiled one once, as its wrapper."""
    seen = {""}
    for raw, module in model.named_modules():
        name = ".".join(part for part in raw.split(".") if part != COMPILED)
        if name not in seen:
            seen.add(name)
            yield name, module


def _expression(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    return re.compile("".join(_STARS.get(part, re.escape(part)) for part in parts))
