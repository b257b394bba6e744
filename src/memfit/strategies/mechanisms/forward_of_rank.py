"""A model's forward on one rank of several: it computes its share of the batch, and gets what others compute.

    forward     batch ──> own rows ── model ──> own rows of outputs ── all-gather ──> outputs of the batch
    backward    gradient of the outputs ──> own rows, times N ── model ──> gradients that ranks average

The script of each rank has the whole batch, its outputs and its loss, as one process has: any loss of the
outputs, metrics, logs and control flow are those of one process. A model that returns its loss gets that of
the whole batch. Forwards without gradients, as in evaluation, run whole on every rank.
"""

import ctypes
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from memfit.card.detect_card import is_ghost_loaded
from memfit.errors import UsageError
from memfit.strategies.mechanisms.independent_samples import numbers_among
from memfit.strategies.mechanisms.join_outputs import DIM_ADVICE, Layout, SamplesInOutput
from memfit.strategies.mechanisms.loss_divisor import IN_LOOP, LossRule, SumOfSlices
from memfit.strategies.mechanisms.numbers_of_forward import Number, numbers_of_forward
from memfit.strategies.mechanisms.sliced_forward import SlicedForward, expect_not_compiled
from memfit.strategies.mechanisms.split_batch import even_micro_batch_sizes

_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name up to PyTorch 2.13 is the latter."""

_DRAW_ALIKE = (
    "Each rank runs the script, and must draw the same data: seed the generators that the script creates "
    "itself, and let nothing depend on the time, the rank or the order of a set."
)
_PAD_ALIKE = (
    "The ranks' outputs cannot be joined: pad them to one length (total_length of pad_packed_sequence)."
)


@dataclass(slots=True)
class Reduction:
    """Whether ranks have reduced the gradients of the last forward: DistributedDataParallel does it once."""

    is_done: bool = False

    def finish(self) -> None:
        """Note that a backward has ended."""
        self.is_done = True


@dataclass(frozen=True, slots=True)
class ShareOfRank:
    """How the batches of a model are divided among the ranks of the default process group."""

    refuse: Callable[[str], None] = lambda _: None
    """Called with the reason if they cannot be divided, before the error is raised."""

    difference: Callable[[str, Any], str] = lambda *_: ""
    """Returns which rank differs, if what each must have alike does; its name comes first."""
    dim: int = 0
    """The dimension of the model's inputs along which samples lie."""
    reduction: Reduction | None = None
    """Of the model, if one backward alone reduces what a forward leads to."""

    def expect_first_backward(self) -> None:
        """Check that no backward has ended since the model's last forward."""
        if self.reduction is None:
            return
        if self.reduction.is_done:
            why = (
                "sharding: a second backward follows a forward of the model, and DistributedDataParallel "
                "reduces gradients in the first one alone. Add the losses and call backward once, run the "
                "second forward after the first backward, or use fsdp2."
            )
            self.refuse(why)
            raise UsageError(why)
        torch.autograd.Variable._execution_engine.queue_callback(self.reduction.finish)

    def expect_same(self, name: str, value: Any, advice: str = _DRAW_ALIKE) -> None:
        """Check that the ranks have something alike."""
        if why := self.difference(name, value):
            self.refuse(f"{why} {advice}")
            raise UsageError(f"{why} {advice}")


class ForwardOfRank(SlicedForward):
    """The forward of a model that computes the rank's share of each batch; ``around``: a ``ShareOfRank``."""

    def __init__(self, module: nn.Module, around: ShareOfRank, inner: Callable[..., Any] | None) -> None:
        super().__init__(module, around, inner)
        self._shapes: dict[Any, Any] = {}
        """Of the outputs of each sample, by the kind of call and the shapes of inputs and parameters."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward on this rank's share, if a backward may follow and each rank gets a sample."""
        forward = self.__wrapped__
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        try:
            expect_not_compiled()
            return self._share(forward, args, kwargs)
        except UsageError as error:  # of the mechanism that batch slices use as well
            why = str(error).replace("batch_slices", "sharding").replace("slice", "share")
            why = why.replace(DIM_ADVICE, "put them there (batch_first=True)")
            self.around.refuse(why)
            raise UsageError(why) from error

    def _share(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        as_passed: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        samples = self._samples(self._rows_first(as_passed))
        if samples < ranks:  # every rank computes all of it
            return forward(*args, **kwargs)
        self.around.expect_same("the batch", as_passed)
        passed, sizes = self._kind_of(as_passed), even_micro_batch_sizes(samples, ranks)
        self._check(passed, as_passed, len(args), sizes)
        dims = self._dims[passed]
        call = self._rows_first(tree_map_only(torch.Tensor, _entering, as_passed), dims)
        own_args, own_kwargs = self._arguments(self._splitter.split(call, sizes)[rank], len(args), dims)
        rule, factors = self._rules[passed][0], []
        wanted = rule is not None and rule.needs_numbers
        with _random_numbers_of_rank(self.module, rank), numbers_of_forward(wanted=wanted) as numbers:
            leaves, spec = tree_flatten(self._on_slice(*own_args, **own_kwargs))
        if spec not in self._layouts:
            raise UsageError(
                "sharding: the model returns differently built outputs for its share of a batch and for two "
                "samples. Return the same for every batch."
            )
        places = self._layouts[spec]
        self._expect_same_shapes(passed, (own_args, own_kwargs), leaves, places, sizes[rank])
        share = _Share(sizes, rank, self.around)
        if self.around.reduction is not None:
            self.around.reduction.is_done = False
        for index, place in enumerate(places):
            leaf = leaves[index]
            if place is not None:
                leaves[index] = share.gathered(leaf, place)
            elif rule is not None and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                factors = rule.python_numbers(leaf)
                leaves[index] = _loss_of_ranks(leaf, rule, self.around, numbers.found if numbers else ())
        _expect_same_numbers([*numbers_among(leaves), *factors], self.module)
        output = tree_unflatten(leaves, spec)
        self._expect_numbers(output, factors, passed, as_passed, samples, len(args))
        return output

    def _expect_same_shapes(
        self, passed: Any, own: Any, leaves: list[Any], places: Layout, samples: int
    ) -> None:
        """Check that the ranks' outputs can be joined: all ranks compare those of a new kind of call."""
        inputs = (each.shape[1:] for each in tree_leaves(own) if isinstance(each, torch.Tensor))
        kind = (passed, *inputs, None, *(each.shape for each in self.module.parameters()))
        shapes = []
        for leaf, place in zip(leaves, places, strict=True):
            if place is not None:
                shapes.append([*leaf.shape])
                shapes[-1][place.dim] //= samples
        before = self._shapes.setdefault(kind, shapes)
        if before is shapes:
            alike = [torch.tensor(each, device="cpu") for each in shapes]
            self.around.expect_same(f"output shape {len(self._shapes)}", alike, _PAD_ALIKE)
        elif before != shapes:
            raise UsageError(
                f"sharding: the model returns {shapes} for each sample of this rank, and {before} before, "
                f"for inputs of the same shape. {_PAD_ALIKE}"
            )

    def _rule(self, *given: Any) -> tuple[LossRule | None, list[float]]:
        with _evaluating_batch_norms(self.module):
            return super()._rule(*given)


@dataclass(frozen=True, slots=True)
class _Share:
    """Which samples of a batch a rank has."""

    sizes: list[int]
    rank: int
    around: ShareOfRank

    def gathered(self, own: torch.Tensor, place: SamplesInOutput) -> torch.Tensor:
        """Return an output of the whole batch, from those of all ranks."""
        dim, samples = place.dim, self.sizes[self.rank]
        if place.alternate:
            own, dim = place.rows(own.contiguous(), samples, 0, samples), dim + 1
        whole: torch.Tensor = _Gathered.apply(own.movedim(dim, 0), self)
        whole = whole.movedim(0, dim) if dim else whole
        return whole.flatten(place.dim, dim) if place.alternate else whole.contiguous()

    def rows(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return each rank's rows of a tensor that has some for every sample."""
        of_each = whole.size(0) // sum(self.sizes)
        return list(torch.split(whole, [size * of_each for size in self.sizes]))


class _Gathered(torch.autograd.Function):
    """An output of the whole batch; the gradient of this rank's rows, times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, share: _Share) -> torch.Tensor:
        ctx.share = share
        own = own.contiguous()
        rows = own.size(0) // share.sizes[share.rank]
        whole = own.new_empty((rows * sum(share.sizes), *own.shape[1:]))
        if len(set(share.sizes)) == 1:
            _ALL_GATHER(whole, own)
            return whole
        parts = share.rows(whole)
        parts[share.rank].copy_(own)
        for src, part in enumerate(parts):
            dist.broadcast(part, src)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _expect_no_second_derivative()
        share = ctx.share
        share.around.expect_first_backward()
        share.around.expect_same("the gradient of the model's output", gradient)
        return share.rows(gradient)[share.rank] * len(share.sizes), None


class _Entered(torch.autograd.Function):
    """An input that requires a gradient; its gradient is that of all ranks' rows."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        _expect_no_second_derivative()
        gradient = gradient / dist.get_world_size()
        dist.all_reduce(gradient)
        return gradient


class _LossOfRanks(torch.autograd.Function):
    """The loss of the whole batch, of what each rank's samples add to it."""

    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        divisors: torch.Tensor,
        counts: torch.Tensor,
        rule: LossRule,
        around: ShareOfRank,
    ) -> torch.Tensor:
        ctx.around = around
        of_ranks = own.new_zeros((dist.get_world_size(), len(counts)))
        of_ranks[dist.get_rank()] = counts
        both = torch.cat((own[None], divisors, of_ranks.flatten()))
        dist.all_reduce(both)
        total, sums, of_ranks = both[0], both[1 : 1 + len(divisors)], both[1 + len(divisors) :]
        if (
            len(sums) > 1
            and not is_ghost_loaded()
            and not torch.allclose(divisors * sums[0], sums * divisors[0])
        ):
            raise UsageError(
                "sharding: the model's loss adds means over different numbers of elements, which weigh the "
                f"ranks' samples differently. {IN_LOOP}"
            )
        divisor: torch.Tensor | float = sums[0] if len(sums) else 1
        if rule.needs_numbers:
            divisor = rule.divisor_of(of_ranks.view(-1, len(counts)).tolist())
        ctx.factor = dist.get_world_size() / divisor
        return total / divisor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _expect_no_second_derivative()
        ctx.around.expect_first_backward()
        return gradient * ctx.factor, *[None] * 4


def _entering(each: torch.Tensor) -> torch.Tensor:
    entered: torch.Tensor = _Entered.apply(each) if each.requires_grad else each
    return entered


def _loss_of_ranks(
    loss: torch.Tensor, rule: LossRule, around: ShareOfRank, numbers: Sequence[Number]
) -> torch.Tensor:
    """Return the loss of the whole batch.

    Raises:
        UsageError: its terms weigh the ranks' samples differently.
    """
    own = SumOfSlices(rule).add(loss)
    divisors = rule.divisors(loss)
    given, counts = (
        torch.stack([torch.as_tensor(each, dtype=own.dtype, device=own.device) for each in row])
        if row
        else own.new_empty(0)
        for row in (divisors, [divisors[0], *rule.counts(numbers)] if rule.needs_numbers else [])
    )
    whole: torch.Tensor = _LossOfRanks.apply(own, given, counts, rule, around)
    return whole.to(loss.dtype)


def _expect_same_numbers(numbers: Sequence[float], module: nn.Module) -> None:
    """Check that what multiplies every rank's loss, or is returned beside it, is the same on all."""
    if not numbers or is_ghost_loaded():
        return
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    extremes = torch.tensor([numbers, [-each for each in numbers]], dtype=torch.float64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    for most, least in zip(*extremes.tolist(), strict=True):
        if most != -least:
            raise UsageError(
                "sharding: the model returns a number, or multiplies or divides its loss by one, that it "
                f"computes from the samples: from {-least} to {most} for each rank's. {IN_LOOP}"
            )


def _expect_no_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise UsageError(
            "sharding: a second derivative (create_graph=True) needs the graphs of all ranks. Train this "
            "script on one GPU, or write its training for several."
        )


@contextmanager
def _random_numbers_of_rank(module: nn.Module, rank: int) -> Iterator[None]:
    """Draw other random numbers on each rank within; afterwards every rank goes on with the same.

    A model that draws none leaves the generator as it is. Python's and NumPy's generators, and the CPU's for
    a model on a GPU, stay the same on all ranks: models choose layers with them.
    """
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
    before = generator.get_state()
    common = zlib.crc32(_content(before)) << 20
    generator.manual_seed(common + 1 + rank)
    seeded = _content(generator.get_state())
    try:
        yield
    finally:
        if _content(generator.get_state()) == seeded:
            generator.set_state(before)
        else:
            generator.manual_seed(common)


def _content(state: torch.Tensor) -> bytes:
    # .numpy() would dispatch operations, and an operation counter would add them to the forward.
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def batch_norms_in_training(module: nn.Module) -> list[str]:
    """Return the names of the layers that normalise by the samples of a rank."""
    return [
        f"{type(part).__name__} {name or 'the model'}"
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and part.training and not isinstance(part, nn.SyncBatchNorm)
    ]


@contextmanager
def _evaluating_batch_norms(module: nn.Module) -> Iterator[None]:
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.training]
    for part in norms:
        part.training = False
    try:
        yield
    finally:
        for part in norms:
            part.training = True
