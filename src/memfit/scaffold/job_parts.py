"""The parts of a job, as code, from what was seen of a script."""

import ast
import builtins
import inspect
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.records import ObservedJob
from memfit.scaffold.batches import code_of_batch, has_tensors, is_plain, tensors_in
from memfit.scaffold.call_sites import CallSite
from memfit.scaffold.code import code_of, name_of
from memfit.scaffold.expressions import Rewritten, UnknownName, is_known, rewrite
from memfit.scaffold.loss_statements import (
    LossStatements,
    call_at,
    free_names,
    is_guarded,
    loss_statements,
    needed_for,
    statements_before,
)

_PLANNED = "memfit plan plans for the script as it is."
_ABSENT = object()
_LIBRARY = (
    "No function of the script has both the call of the model and loss.backward(): a library has the "
    f"training loop. {_PLANNED}"
)
_MOST_FROZEN = 8
"""Modules that are frozen, a line for each."""


class NoJobError(Exception):
    """A script cannot become a job: the message says why."""


@dataclass(slots=True)
class Seen:
    """What was seen of a script up to its first update."""

    models: list[tuple[nn.Module, CallSite | None]] = field(default_factory=list)
    """Those that optimizers take, with the calls that create them."""
    optimizers: list[tuple[torch.optim.Optimizer, CallSite | None]] = field(default_factory=list)
    loss: tuple[CallSite, CallSite] | None = None
    """Two calls of one function: in one the model was called first, in the other the backward began."""
    limits: dict[int, int] = field(default_factory=dict)
    """By the address of a storage: the number below which its numbers must stay."""
    max_grad_norm: float | None = None
    scheduler: str = ""
    main: CallSite | None = None
    """The call in the script's outermost code that trains."""
    autocast: bool = False
    """Whether the model was called under autocast."""


def job_of(seen: Seen) -> ObservedJob:
    """Return the job of a script.

    Raises:
        NoJobError: a job cannot do what it does, or memfit cannot read it.
    """
    if len(seen.optimizers) != 1 or len(seen.models) != 1:
        raise NoJobError(
            f"A job has one model and one optimizer; memfit saw {len(seen.models)} and "
            f"{len(seen.optimizers)}. {_PLANNED}"
        )
    ((model, created),) = seen.models
    ((optimizer, optimized),) = seen.optimizers
    script = _script_name()
    new = _model(created, script)
    loss = _loss(seen, model, script)
    made, open_ends = _optimizer(optimizer, model)
    freezing, frozen = _freezing(model)
    open_ends = [
        *map(_to_define, new.unknown),
        *loss.open,
        *open_ends,
        *frozen,
    ]
    if seen.main is not None and not is_guarded(seen.main.source, seen.main.span):
        file = Path(seen.main.frame.f_code.co_filename).name
        open_ends.append(
            f'{file} trains when it is imported. Put its training under if __name__ == "__main__".'
        )
    if seen.scheduler:
        open_ends.append(f"The script has a {seen.scheduler}: add scheduler and scheduler_interval.")
    return ObservedJob(
        model=new.lines,
        optimizer=made,
        loss=loss.lines.lines,
        batch=loss.batch,
        batch_size=loss.size,
        prepare=(*_dtype(model), *freezing),
        max_grad_norm=seen.max_grad_norm,
        imports=tuple(sorted(new.imports | loss.lines.imports)),
        open=tuple(dict.fromkeys(open_ends)),
        model_line=created.line if created is not None else "",
        optimizer_line=optimized.line if optimized is not None else "",
        loss_line="" if seen.loss is None else seen.loss[1].line,
    )


def _script_name() -> str:
    """Return the name under which the script can be imported; empty if there is none."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:  # python -m
        return str(spec.name)
    name = Path(getattr(main, "__file__", "")).stem
    return name if name.isidentifier() else ""


def _model(created: CallSite | None, script: str) -> Rewritten:
    """Return the expression that creates a model, after the statements that make what it needs."""
    call = None if created is None else call_at(created.source, created.span)
    if created is None or call is None:
        raise NoJobError("memfit did not see where the script creates its model.")

    def rewritten(nodes: Sequence[ast.AST]) -> Rewritten:
        return rewrite(nodes, free_names(nodes), created.values, lambda *_: None, script)

    alone = rewritten([call])
    if not alone.unknown:
        return alone
    before = statements_before(created.source, created.span)
    values = created.values

    def known(name: str) -> bool:
        return name in dir(builtins) or is_known(values.get(name, _ABSENT), script)

    settings = [name for name, value in values.items() if isinstance(value, Namespace)]
    unknown = [each.name for each in alone.unknown]
    needed = needed_for(unknown, before, known=known, settings=settings, methods=True)
    return rewritten([*needed, call_at(created.source, created.span) or call])


@dataclass(frozen=True, slots=True)
class _Loss:
    lines: Rewritten
    batch: str
    """The expression that makes a batch."""
    size: int
    """Samples in the script's batch; 0 if it has no tensors."""
    open: list[str]


def _loss(seen: Seen, model: nn.Module, script: str) -> _Loss:
    """Return the loss, and the batch that it is computed from."""
    forward, backward = seen.loss or (None, None)
    if forward is None or backward is None:
        raise NoJobError(_LIBRARY)
    found = loss_statements(backward.source, forward.span, backward.span)
    if found is None:
        raise NoJobError(_LIBRARY)
    passed: dict[str, Any] = {}

    def part(name: str, value: Any) -> str | None:
        if isinstance(value, nn.Module) and _holds(value, model):
            return "model"
        if has_tensors(value) and is_plain(value):
            passed[name] = value
            return name
        return None

    nodes = [*found.statements, found.loss]
    lines = rewrite(nodes, found.free_names(), forward.values, part, script)
    size = next((each.shape[0] for each in tensors_in(list(passed.values())) if each.dim()), 0)
    made = [code_of_batch(value, size, seen.limits) for value in passed.values()]
    unpacked = [f"{', '.join(passed)} = batch"] if passed else []
    body = (*unpacked, *lines.lines[:-1], f"return {lines.lines[-1]}")
    open_ends = [*map(_to_define, lines.unknown), *_open(found, passed, size)]
    if seen.autocast and not found.scaled and not any("autocast" in line for line in lines.lines):
        open_ends.append("The script calls its model under autocast: pass memfit.Precision(...) to Engine.")
    return _Loss(replace(lines, lines=body), ", ".join(made) or "None", size, open_ends)


def _open(found: LossStatements, passed: Mapping[str, Any], size: int) -> Iterator[str]:
    """Yield what a job of a loss leaves to the user.

    Args:
        found: the loss.
        passed: by name, what it is computed from.
        size: samples in the batch.
    """
    if not passed:
        yield "memfit saw no tensors that the loss is computed from. Write batch(size)."
    for name, value in passed.items():
        if all(not each.dim() or each.shape[0] != size for each in tensors_in(value)):
            yield f"If {name} is not a part of the batch, create it in loss() instead of batch()."
    if found.scaled:
        yield (
            "The script scales its loss. Leave autocast out of the loss, and pass memfit.Precision('fp16') "
            "to Engine, which scales it."
        )
    if found.changes_gradients:
        yield "The script changes gradients before optimizer.step(). Engine only clips their norm."
    if any(map(_is_divided, (*found.statements, found.loss))):
        yield (
            "The loss is divided by a number. If that is how the script accumulates gradients, leave it out: "
            "Engine divides."
        )


def _to_define(unknown: UnknownName) -> str:
    return f"Define {unknown.name} ({unknown.kind}): memfit cannot write it as code."


def _is_divided(node: ast.AST) -> bool:
    """Return whether something is divided by a number above 1, after names became values."""
    return any(
        isinstance(each, ast.BinOp)
        and isinstance(each.op, ast.Div)
        and isinstance(each.right, ast.Constant)
        and isinstance(each.right.value, int)
        and each.right.value > 1
        for each in ast.walk(node)
    )


def _holds(module: nn.Module, model: nn.Module) -> bool:
    """Return whether a module is the model, or wraps it."""
    return module is model or any(each is model for each in module.modules())


def _optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[str, list[str]]:
    """Return the expression that creates an optimizer from ``model``, and what is left open."""
    kind = type(optimizer)
    named = name_of(kind, "")
    known = getattr(torch.optim, kind.__name__, None) is kind
    name = f"torch.optim.{kind.__name__}" if known else f"{kind.__module__}.{kind.__qualname__}"
    open_ends = [] if named is not None else [f"Create the {kind.__qualname__} yourself."]
    first = optimizer.param_groups[0]
    group = {**first, "lr": first.get("initial_lr", first.get("lr"))}  # a scheduler may have changed it
    settings = []
    for parameter in inspect.signature(kind).parameters.values():
        value = group.get(parameter.name, parameter.default)
        if parameter.name != "params" and value != parameter.default and (code := code_of(value)) is not None:
            settings.append(f"{parameter.name}={code.text}")
    if len(optimizer.param_groups) > 1:
        open_ends.append(
            f"The script's optimizer has {len(optimizer.param_groups)} groups of parameters; this one has "
            "the settings of the first for all."
        )
    trained = {id(each) for some in optimizer.param_groups for each in some["params"]}
    parameters = "model.parameters()"
    if trained != {id(each) for each in model.parameters()}:
        parameters = "(each for each in model.parameters() if each.requires_grad)"
    return f"{name}({', '.join([parameters, *settings])})", open_ends


def _dtype(model: nn.Module) -> Iterator[str]:
    """Yield the line that converts a model, if all its parameters have another dtype than new ones."""
    dtypes = {each.dtype for each in model.parameters()}
    if len(dtypes) == 1 and dtypes != {torch.get_default_dtype()}:
        yield f"model.to({dtypes.pop()})"


def _freezing(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return lines that freeze what the script froze, or what is left open."""
    frozen: list[str] = []
    for path, module in model.named_modules():
        parameters = list(module.parameters())
        inside = any(path.startswith(f"{each}.") for each in frozen)
        if parameters and not inside and not any(each.requires_grad for each in parameters):
            frozen.append(path)
    if len(frozen) <= _MOST_FROZEN:
        return [f"model.get_submodule({path!r}).requires_grad_(False)" for path in frozen], []
    trained = sum(each.requires_grad for each in model.parameters())
    total = len(list(model.parameters()))
    return [], [f"The script trains {trained} of its {total} parameters. Check that this model does."]
