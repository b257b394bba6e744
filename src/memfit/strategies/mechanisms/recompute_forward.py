"""Recompute a module's forward in backward: torch.utils.checkpoint, and what that leaves to its callers.

module.forward = CheckpointedForward ── checkpoint(CheckpointedCall, *tensors)
                                          first call:   the forward, with the caller's arguments
                                          later calls:  the same, with the same buffers and random numbers
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from memfit.dispatch_modes import without_dispatch_modes
from memfit.errors import UsageError
from memfit.random_state import DrawnRandomNumbers
from memfit.strategies.mechanisms.buffer_snapshots import BufferTracker
from memfit.strategies.mechanisms.inspect_tensors import tensor_version, tensors_in_object
from memfit.strategies.mechanisms.recomputation_counter import active_operation_counter, mark_as_recomputed
from memfit.strategies.mechanisms.recompute_check import FingerprintComparer, FingerprintRecorder
from memfit.strategies.mechanisms.recompute_in_parts import recompute_in_parts
from memfit.strategies.mechanisms.selective_checkpointing import (
    KeptResults,
    make_keep_decision,
    operations_not_run,
    products_called_less_often,
    selective_contexts_for_compile,
)
from memfit.strategies.mechanisms.single_tensor_recompute import recompute_single_tensors
from memfit.strategies.mechanisms.wrap_forward import Forward, WrappedForward
from memfit.user_lines import warn_user

Context = AbstractContextManager[Any]


@dataclass(frozen=True, slots=True)
class RecomputeSettings:
    """How one region is recomputed, and its name for messages."""

    name: str
    save_ops: tuple[str, ...]
    use_reentrant: bool
    preserve_rng_state: bool
    check: bool
    split_at: tuple[str, ...] = ()
    """Submodules of the region at whose first calls another part begins."""
    recompute: Literal["module", "tensors"] = "module"


class CheckpointedForward(WrappedForward):
    """The forward of one checkpointed module."""

    def __init__(self, module: nn.Module, around: RecomputeSettings, inner: Forward | None) -> None:
        super().__init__(module, around, inner)
        self.settings = around
        self.buffer_tracker = BufferTracker(around.name)
        self._is_known = False  # whether it runs the operations whose results it is to keep

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward so that it can be recomputed, if a backward may follow."""
        forward, settings = self.__wrapped__, self.settings
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler makes one graph of the region and decides there what is recomputed; buffers change
            # once.
            contexts: dict[str, Any] = {}
            if settings.save_ops:
                contexts["context_fn"] = partial(selective_contexts_for_compile, settings.save_ops)
            return checkpoint(
                forward,
                *args,
                use_reentrant=settings.use_reentrant,
                preserve_rng_state=settings.preserve_rng_state,
                **contexts,
                **kwargs,
            )
        if settings.recompute == "tensors":
            return self._run_on_tape(partial(forward, *args, **kwargs))
        return self.run_again(forward, args, kwargs)

    def _run_on_tape(self, forward: Forward) -> Any:
        seen: Counter[Any] = Counter()
        result = recompute_single_tensors(make_keep_decision(self.settings.save_ops, seen), forward)
        self.expect_run(seen)
        return result

    def run_again(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run a forward of the module so that it runs again in the backward."""
        settings = self.settings
        leaves, spec = tree_flatten((args, kwargs))
        differentiable = (each.requires_grad for each in leaves if isinstance(each, torch.Tensor))
        if not any(differentiable) and not any(each.requires_grad for each in self.module.parameters()):
            return forward(*args, **kwargs)
        once = list({id(each): each for each in leaves}.values())
        place = {id(each): index for index, each in enumerate(once)}
        with without_dispatch_modes():
            call = CheckpointedCall(
                self, forward, (args, kwargs), spec, tuple(place[id(each)] for each in leaves)
            )
            differentiable_dummy = torch.empty(0, requires_grad=True)
        if settings.split_at:
            return recompute_in_parts(
                call, once, [self.module.get_submodule(name) for name in settings.split_at]
            )
        if not settings.use_reentrant:
            return checkpoint(
                call, *once, use_reentrant=False, preserve_rng_state=settings.preserve_rng_state
            )
        # Reentrant checkpointing looks for something to differentiate among its arguments, not among the
        # parameters: without the dummy the parameters of a first layer would get no gradients.
        results = checkpoint(
            call,
            differentiable_dummy,
            *once,
            use_reentrant=True,
            preserve_rng_state=settings.preserve_rng_state,
        )
        return call.result(results)

    @property
    def _is_on_gpu(self) -> bool:
        return any(each.is_cuda for each in self.module.parameters())

    def expect_run(self, seen: "Counter[Any]") -> None:
        """Warn if the first forward did not run all operations whose results are to be kept."""
        if self._is_known:
            return
        self._is_known = True
        if missing := operations_not_run(self.settings.save_ops, seen):
            if (counter := active_operation_counter()) is not None:
                counter.miss(missing if self._is_on_gpu else products_called_less_often(missing, seen))
            # By class: Python shows equal warnings once, and a network has many equal blocks.
            warn_user(
                f"checkpointing: {type(self.module).__name__} did not run {len(missing)} of the "
                f"{len(self.settings.save_ops)} operations whose results it is to keep: "
                f"{', '.join(missing)}. What it does not keep is recomputed. The plan may be for another "
                "model, device or PyTorch."
            )


class CheckpointedCall:
    """One call of a region: the forward, then the same again as often as backward needs it.

    Only ``checkpoint`` keeps the arguments, as it keeps tensors: visible to saved-tensor hooks, and checked
    for later changes. It gets each once: a tensor that is passed twice must be one tensor in the
    recomputation, too, because ``nn.MultiheadAttention`` asks whether its query is its key.
    """

    def __init__(
        self,
        region: CheckpointedForward,
        forward: Forward,
        passed: tuple[tuple[Any, ...], dict[str, Any]],
        spec: TreeSpec,
        places: tuple[int, ...],
    ) -> None:
        self._region, self._forward, self._spec, self._places = region, forward, spec, places
        self._passed: tuple[tuple[Any, ...], dict[str, Any]] | None = passed
        self._result: TreeSpec | None = None
        settings = region.settings
        self._name = settings.name
        self._buffers = region.buffer_tracker.snapshot(region.module)
        # torch's checkpoint restores the CPU's generator itself.
        of_cpu = (torch.default_generator,) if settings.split_at else ()
        self._generators = (*self._buffers.generators, *of_cpu)
        self._draws = DrawnRandomNumbers.start(self._generators) if settings.preserve_rng_state else None
        self._kept = KeptResults(settings.save_ops) if settings.save_ops else None
        self._recorder = FingerprintRecorder() if settings.check else None
        self._parameters: tuple[tuple[str, nn.Parameter, int], ...] = ()
        """The region's, with their versions after its forward."""

    def __call__(self, *once: Any) -> Any:
        """Run the forward."""
        if self._region.settings.use_reentrant:
            once = once[1:]
        leaves = tuple(once[place] for place in self._places)
        if self._passed is not None:
            # With the very objects that were passed: a list that the forward appends to is the caller's.
            (args, kwargs), self._passed = self._passed, None
            result = self._first(leaves, args, kwargs)
            if self._kept is not None:
                self._region.expect_run(self._kept.seen)
        else:
            args, kwargs = tree_unflatten(leaves, self._spec)
            self._expect_unchanged_parameters()
            with ExitStack() as stack:
                for context in self._recompute_contexts():
                    stack.enter_context(context)
                result = self._forward(*args, **kwargs)
        if not self._region.settings.use_reentrant:
            return result
        results, self._result = tree_flatten(result)
        self._expect_no_hidden_tensors("returns", results, lambda _: True)
        return tuple(results)

    def _expect_unchanged_parameters(self) -> None:
        """Refuse to recompute with other parameters, as ``checkpoint`` does with other arguments.

        Only the first time: an optimizer that steps in the backward changes them between a region's parts.
        """
        parameters, self._parameters = self._parameters, ()
        for name, parameter, version in parameters:
            if tensor_version(parameter) != version:
                raise UsageError(
                    f"{self._name} cannot be checkpointed: after its forward, and before its backward, the "
                    f"script changes its parameter {name} in place. The recomputation would use the changed "
                    "values. Change parameters after the backward, or do not checkpoint this module."
                )

    def result(self, leaves: Any) -> Any:
        """Reassemble what a reentrant forward returned in pieces."""
        if self._result is None:
            raise AssertionError("the forward has not run")
        return tree_unflatten(leaves, self._result)

    def _expect_no_hidden_tensors(
        self, verb: str, leaves: Iterable[Any], matters: Callable[[torch.Tensor], bool]
    ) -> None:
        """Refuse tensors inside objects: reentrant checkpointing loses their gradients."""
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) and any(map(matters, tensors_in_object(leaf))):
                raise UsageError(
                    f"{self._name} cannot be checkpointed with use_reentrant=True: its forward {verb} an "
                    f"object of type {type(leaf).__name__} that contains tensors. The gradients of these "
                    "tensors would be lost. Leave out use_reentrant."
                )

    def _attributes(self) -> dict[tuple[int, str], torch.Tensor]:
        """Return the tensors that are plain attributes of the region's modules, such as a router's loss."""
        return {
            (index, name): value
            for index, part in enumerate(self._buffers.parts)
            for name, value in vars(part).items()
            if isinstance(value, torch.Tensor)
        }

    def _warn_of_attributes(self, before: dict[tuple[int, str], torch.Tensor]) -> None:
        new = {
            name
            for (index, name), value in self._attributes().items()
            if before.get((index, name)) is not value
        }
        if new:
            warn_user(
                f"{self._name} stored tensors as attributes of modules ({', '.join(sorted(new))}). Reentrant "
                "checkpointing records no gradients for these tensors. If the loss uses them, part of the "
                "gradient is missing. Leave out use_reentrant.",
            )

    def _first(self, leaves: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        versions = [tensor_version(each) for each in leaves]
        holders = [(each, tensors_in_object(each)) for each in leaves if not isinstance(each, torch.Tensor)]
        unpreserved = (
            (torch.get_rng_state(), DrawnRandomNumbers.start(self._generators))
            if self._buffers.first and self._draws is None
            else None
        )
        reentrant = self._region.settings.use_reentrant
        if reentrant:
            self._expect_no_hidden_tensors("is passed", leaves, lambda each: each.requires_grad)
        attributes = self._attributes() if reentrant else {}
        keeping = nullcontext() if self._kept is None else self._kept.forward()
        with keeping, self._recorder or nullcontext():
            result = self._forward(*args, **kwargs)
        if reentrant:
            self._warn_of_attributes(attributes)
        for each, held in holders:
            if not _same_objects(held, tensors_in_object(each)):
                raise UsageError(
                    f"{self._name} cannot be checkpointed: its forward changes an argument of type "
                    f"{type(each).__name__}. The recomputation would start from the changed object. Do not "
                    "pass such an argument. In transformers, pass use_cache=False to the model."
                )
        changed = [index for index, each in enumerate(leaves) if tensor_version(each) != versions[index]]
        if changed:
            raise UsageError(
                f"{self._name} cannot be checkpointed: its forward changes argument {changed[0]} (counting "
                "from 0) in place. The recomputation would start from the changed tensor. Use an "
                "out-of-place operation, or checkpoint a larger module that creates this tensor itself."
            )
        self._parameters = tuple(
            (name, each, tensor_version(each)) for name, each in self._region.module.named_parameters()
        )
        with without_dispatch_modes():
            self._region.buffer_tracker.record_changes(self._buffers)
            if self._draws is not None:
                self._draws.keep_drawn()
            if unpreserved is not None:
                self._warn_if_drawn(*unpreserved)
        return result

    def _warn_if_drawn(self, cpu: torch.Tensor, draws: DrawnRandomNumbers) -> None:
        draws.keep_drawn()
        if not draws.before and torch.equal(cpu, torch.get_rng_state()):
            return
        module, name = self._region.module, self._name
        parts = [part for part, each in module.named_modules() if isinstance(each, _DropoutNd)]
        dropouts = ", ".join(f"{name}.{part}".rstrip(".") for part in parts)
        warn_user(
            f"{name} draws random numbers{f' (in {dropouts})' if parts else ''}, but preserve_rng_state is "
            "False. The recomputation draws other random numbers than the forward, so gradients are wrong. "
            "Set preserve_rng_state=True.",
        )

    def _recompute_contexts(self) -> list[Context]:
        others = dict if self._kept is None else self._kept.others
        contexts: list[Context] = [self._buffers.restored(), mark_as_recomputed(others)]
        if self._draws is not None:
            contexts.append(self._draws.replay())
        if self._kept is not None:
            contexts.append(self._kept.recomputation())
        if self._recorder is not None:
            contexts.append(FingerprintComparer(self._name, self._recorder.fingerprints))
        return contexts


def _same_objects(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
