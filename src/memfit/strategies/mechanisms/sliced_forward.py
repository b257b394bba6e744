"""A model's forward, slice by slice of its batch: what a slice keeps for its backward exists one at a time.

    forward     batch ── split ──┬─ slice 0 ── model, dropped ──┐
                                 ├─ slice 1 ── model, dropped ──┼──> outputs of the whole batch ── loss
                                 └─ slice 2 ── model, kept ─────┘
    backward    slice 2's backward; slice 1 again, its backward; slice 0 again, its backward

The loop sees one call of the model and one backward pass. Gradients are the sums of those of the slices: the
same terms, added in another order. A dropped slice is a checkpointed call of the whole model.
"""

import random
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.card.detect_card import is_ghost_loaded
from memfit.dispatch_modes import without_dispatch_modes
from memfit.errors import UsageError
from memfit.strategies.mechanisms.buffer_snapshots import own_generators
from memfit.strategies.mechanisms.constant_draws import ConstantDraws
from memfit.strategies.mechanisms.forward_side_effects import (
    ADVICE,
    expect_no_forward_hooks,
    package_of_hook,
    without_cache,
)
from memfit.strategies.mechanisms.independent_samples import (
    ModelFailsError,
    expect_independent_layers,
    is_checked_again,
    learn_outputs,
    numbers_among,
)
from memfit.strategies.mechanisms.inspect_tensors import tensor_version, tensors_in_object
from memfit.strategies.mechanisms.join_outputs import JoinedOutputs, OutputLayouts
from memfit.strategies.mechanisms.loss_divisor import LossRule
from memfit.strategies.mechanisms.loss_of_slices import LossOfSlices
from memfit.strategies.mechanisms.recompute_forward import CheckpointedForward, RecomputeSettings
from memfit.strategies.mechanisms.slice_parameters import (
    Aliases,
    ChainedAliases,
    can_be_replaced,
    is_sharded,
    parameters_replaced,
)
from memfit.strategies.mechanisms.split_batch import BatchSplitter, even_micro_batch_sizes
from memfit.strategies.mechanisms.wrap_forward import Forward, WrappedForward

_SHARES = (0.5, 0.02, 0.98)
"""What stands for random numbers in later checks: in one of them happens what has a chance of 1 in 10."""
_AGAIN = RecomputeSettings("the model", (), use_reentrant=False, preserve_rng_state=True, check=False)


class SlicedForward(WrappedForward):
    """The forward of a model whose batches are divided; ``around`` is its ``BatchSlices``."""

    def __init__(self, module: nn.Module, around: Any, inner: Forward | None) -> None:
        super().__init__(module, around, inner)
        self._again = CheckpointedForward(module, _AGAIN, inner)
        self._splitter = BatchSplitter(advice=ADVICE)
        self._layouts = OutputLayouts(alternate=around.dim > 0)
        self._rules: dict[Any, tuple[LossRule | None, list[float]]] = {}
        """What has been learned, by the kind of call: see ``learn_outputs``."""
        self._dims: dict[Any, Mapping[Any, int]] = {}
        """By the same: arguments whose samples lie along another dimension, such as a recurrent state."""
        self._calls: Counter[Any] = Counter()
        """By the same: its calls in slices."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward in slices, if a backward may follow."""
        forward = self.__wrapped__
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        expect_not_compiled()
        as_passed: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        call = self._rows_first(as_passed)
        samples = self._samples(call)
        sizes = even_micro_batch_sizes(samples, self.around.count) if samples else []
        if not sizes[1:]:
            return forward(*args, **kwargs)
        expect_independent_layers(self.module)
        expect_no_forward_hooks(self.module)
        self._expect_own_parameters()
        passed = self._kind_of(as_passed)
        self._check(passed, as_passed, len(args), sizes)
        (rule, _), dims = self._rules[passed], self._dims[passed]
        call = self._rows_first(as_passed, dims)
        if rule is not None:
            if is_sharded(self.module):
                raise UsageError(
                    "batch_slices: the model returns its loss, and FSDP shards its parameters. Return the "
                    "outputs, and compute the loss in the training loop, or leave out batch_slices."
                )
            call, inputs = _with_leaves(call)
            parts = self._splitter.split(call, sizes)
            calls = [self._call(part, len(args), dims) for part in parts]
            work = LossOfSlices(self.module, calls, sizes, self._layouts, rule, inputs)
            output = work.output()
            self._expect_numbers(output, work.python_numbers, passed, as_passed, samples, len(args))
            return output
        outputs, forward = JoinedOutputs(self._layouts, samples), self._on_slice
        chain = ChainedAliases(self.module) if can_be_replaced(self.module) else None
        for number, part in enumerate(self._splitter.split(call, sizes)):
            own = forward if chain is None else _under(chain.of_next_slice(), self.module, forward)
            own_args, own_kwargs = self._arguments(part, len(args), dims)
            is_kept = number >= len(sizes) - self.around.kept
            outputs.add(
                own(*own_args, **own_kwargs) if is_kept else self._again.run_again(own, own_args, own_kwargs),
                sizes[number],
            )
        output = outputs.whole()
        self._expect_numbers(output, (), passed, as_passed, samples, len(args))
        if self.around.kept < len(sizes):
            _expect_same_arguments(output, as_passed)
        return output

    def _expect_numbers(self, output: Any, factors: Sequence[float], passed: Any, *batch: Any) -> None:
        """Check that numbers of a slice are those of two samples of its batch, not counts of its own.

        Args:
            output: of a batch in slices.
            factors: the Python numbers that multiply or divide the loss of every slice.
            passed: the kind of call.
            batch: what ``_learn`` takes.
        """
        found = [*numbers_among(tree_leaves(output)), *factors]
        if found != self._rules[passed][1]:  # a schedule's, perhaps
            self._learn(passed, *batch)
        for own, learned in zip_longest(found, self._rules[passed][1]):
            if own != learned:
                raise UsageError(
                    "batch_slices: the model returns a number, or multiplies or divides its loss by one, "
                    f"that it computes from the samples: {own} for a slice, {learned} for two samples. "
                    f"Return a tensor with a row for each sample, or compute it in the loop. {ADVICE}"
                )

    def _expect_own_parameters(self) -> None:
        """Refuse other parameters for one call: a slice that runs again would have the module's own."""
        for name, each in self.module.named_parameters():
            if not isinstance(each, nn.Parameter) and not is_sharded(self.module):
                raise UsageError(
                    f"batch_slices: the model is called with another tensor as its parameter {name} "
                    f"(torch.func.functional_call), which a slice that runs again would not have. {ADVICE}"
                )

    def _kind_of(self, call: Mapping[Any, Any]) -> Any:
        """Return what decides how a model behaves: its mode, which arguments it gets, hooks on its layers."""
        layers = [part for part in self.module.modules() if part is not self.module]
        count = sum(
            package_of_hook(hook) != "memfit"  # whose come and go while memfit records a step
            for part in layers
            for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks)
            for hook in hooks.values()
        )
        given = frozenset(name for name, each in call.items() if each is not None)
        return self.module.training, given, count

    def _check(self, passed: Any, call: dict[Any, Any], positional: int, sizes: Sequence[int]) -> None:
        """Learn from the first call what the model returns, and check in it and in later ones what that says.

        Raises:
            UsageError: the batches of the model cannot be divided.
        """
        samples, half = sum(sizes), max(sizes[0] // 2, 1)
        if passed not in self._rules:
            self._learn(passed, call, samples, positional)
        self._calls[passed] += 1
        number = self._calls[passed]
        if is_ghost_loaded() or not is_checked_again(number) or _is_capturing():
            return
        begin = random.Random(number).randrange(samples - 2 * half + 1)  # noqa: S311 - the same on each rank
        parts = [begin, half, half, samples - begin - 2 * half]
        for share in _SHARES if number == 1 else (_SHARES[number % len(_SHARES)],):
            draws = ConstantDraws(own_generators(self.module), share)
            try:
                with without_dispatch_modes():  # counters and recorders among them: the step is as ever
                    self._rule(call, parts, positional, self._dims[passed], draws, self._rules[passed][0])
            except ModelFailsError:
                continue  # it may, for such numbers
            if not draws.were_drawn:
                break

    def _learn(self, passed: Any, call: dict[Any, Any], samples: int, positional: int) -> None:
        """Learn what the model returns, and along which dimensions samples of its arguments lie."""
        parts, draws = [0, 1, 1, samples - 2], ConstantDraws(own_generators(self.module))
        others = _other_dimensions(call, samples, self.around.dim)
        try:
            self._rules[passed] = self._rule(call, parts, positional, {}, draws)
            self._dims[passed] = {}
        except UsageError as error:
            if not others:
                raise
            self._splitter = BatchSplitter(advice=ADVICE)  # the other knows these arguments as shared
            self._dims[passed] = others
            try:
                self._rules[passed] = self._rule(call, parts, positional, others, draws)
            except UsageError:
                raise error from None

    def _rule(
        self,
        call: dict[Any, Any],
        parts: Sequence[int],
        positional: int,
        dims: Mapping[Any, int],
        draws: ConstantDraws,
        known: LossRule | None = None,
    ) -> tuple[LossRule | None, list[float]]:
        """Learn what the model returns from two parts of the batch, of four."""
        call, inputs = _with_leaves(self._rows_first(call, dims))
        begin, half, _, end = parts
        _, one, two, _ = self._splitter.split(call, [*parts])
        _, both, _ = self._splitter.split(call, [begin, 2 * half, end])
        whole = set(map(id, tree_leaves(call)))
        shared = [each for each in tree_leaves(one) if id(each) in whole]
        sizes = ((both, 2 * half), (one, half), (two, half))
        calls = [(self._call(part, positional, dims), size) for part, size in sizes]
        leaves = [leaf for _, leaf in inputs]
        return learn_outputs(self.module, calls, leaves, shared, self._layouts, draws, known)

    def _call(self, part: dict[Any, Any], positional: int, dims: Mapping[Any, int]) -> Callable[[], Any]:
        """Return the forward on a part of a batch."""
        args, kwargs = self._arguments(part, positional, dims)
        return partial(self._on_slice, *args, **kwargs)

    def _on_slice(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward on a slice: contiguous, as recurrent layers on a GPU need their state."""
        if self.around.dim or any(self._dims.values()):
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.contiguous, (args, kwargs))
        with without_cache(self.module):
            return self.__wrapped__(*args, **kwargs)

    def _samples(self, call: dict[Any, Any]) -> int:
        """Return the number of samples of a call: the rows of its first tensor, or the entries of a list."""
        most = max((each.dim() for each in tensors_in_object(call)), default=0)
        if self.around.dim >= max(most, 1):
            raise UsageError(
                f"batch_slices: dim={self.around.dim}, and no tensor that the model is passed has such a "
                f"dimension: they have up to {most}. Set dim to that along which samples lie, counted from 0."
            )
        for name, each in call.items():
            if isinstance(each, torch.Tensor) and each.dim() and not each.is_nested:
                return each.size(0)
            if isinstance(each, torch.Tensor | PackedSequence):
                model = type(self.module).__name__.removeprefix("FSDP")  # which fully_shard puts before
                raise UsageError(
                    f"batch_slices: {model} is passed a {type(each).__name__} without a row for each sample, "
                    f"and memfit cannot divide that. {ADVICE}"
                )
            if _is_list_of_tensors(each):
                with suppress(UsageError):  # states are no samples
                    return self._splitter.size(
                        {key: other for key, other in call.items() if _is_list_of_tensors(other)}
                    )
                return self._splitter.size({name: each})
        held = [f", but a {type(each).__name__} of some" for each in call.values() if tensors_in_object(each)]
        raise UsageError(
            f"batch_slices: the model is passed no tensor{''.join(held[:1])}, and memfit cannot divide its "
            f"arguments. Pass tensors, or tuples, lists and dicts of them. {ADVICE}"
        )

    def _arguments(
        self, part: dict[Any, Any], positional: int, dims: Mapping[Any, int]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of one slice as the forward takes them."""
        own = self._rows_first(part, dims)
        return [own.pop(index) for index in range(positional)], own

    def _rows_first(self, call: dict[Any, Any], dims: Mapping[Any, int] = {}) -> dict[Any, Any]:
        """Exchange the dimension along which samples lie with the first, in arguments that have it."""

        def exchange(name: Any, argument: Any) -> Any:
            if not (dim := dims.get(name, self.around.dim)):
                return argument
            return tree_map_only(
                torch.Tensor, lambda each: each.transpose(0, dim) if each.dim() > dim else each, argument
            )

        return {name: exchange(name, argument) for name, argument in call.items()}


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, tuple | list | Mapping) and bool(tensors_in_object(value))


def _expect_same_arguments(outputs: Any, call: Mapping[Any, Any]) -> None:
    """Have a backward of the outputs refuse arguments that were written to since: slices run again with them.

    Autograd's own check does not say which tensor it is.
    """
    passed = [
        (name, weakref.ref(each), tensor_version(each))
        for name, argument in call.items()
        for each in tensors_in_object(argument)
    ]

    def check(_: Any) -> None:
        for name, tensor, version in passed:
            if (each := tensor()) is not None and tensor_version(each) != version:
                raise UsageError(
                    f"batch_slices: after the model's forward, and before its backward, the script changes "
                    f"argument {name!r} of the model in place ({' x '.join(map(str, each.shape))}, "
                    f"{each.dtype}), and slices run again with it. Pass the model a copy. {ADVICE}"
                )

    for each in tree_leaves(outputs):
        if isinstance(each, torch.Tensor) and each.grad_fn is not None:
            each.grad_fn.register_prehook(check)


def expect_not_compiled() -> None:
    """Refuse to be compiled: a compiler would trace memfit, and what it learns of the model.

    Raises:
        UsageError: the caller is.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        _refuse_compiler()


@_disable_dynamo
def _refuse_compiler() -> None:
    raise UsageError(
        "batch_slices: the script compiles the model whose batches are divided. Compile the model, or "
        f"parts of it, before the optimizer is created (before memfit.apply). {ADVICE}"
    )


def _is_capturing() -> bool:
    """Return whether a CUDA graph is captured, in which no value can be read."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _other_dimensions(call: Mapping[Any, Any], samples: int, usual: int) -> dict[Any, int]:
    """Return the only dimension with a row for each sample, of arguments where it is not the usual one."""
    found = {}
    for name, argument in call.items():
        shapes = [each.shape for each in tensors_in_object(argument) if each.dim()]
        common = range(min(map(len, shapes), default=0))
        dims = [dim for dim in common if all(shape[dim] == samples for shape in shapes)]
        if len(dims) == 1 and dims[0] != usual:
            found[name] = dims[0]
    return found


def _with_leaves(call: dict[Any, Any]) -> tuple[dict[Any, Any], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Replace a call's tensors that require a gradient by leaves; return both."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def leaf(each: torch.Tensor) -> torch.Tensor:
        if not each.requires_grad:
            return each
        return made.setdefault(each, each.detach().requires_grad_())

    with_leaves: dict[Any, Any] = tree_map_only(torch.Tensor, leaf, call)
    return with_leaves, list(made.items())


def _under(aliases: Aliases, module: nn.Module, forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        with parameters_replaced(module, aliases):
            return forward(*args, **kwargs)

    return run
