"""Constants in place of random numbers: what a model returns for two batches can then be compared.

torch.rand, torch.randn, bernoulli_ ...   0.5, or what is passed
torch.randint                             as far from its smallest value to its largest
torch.randperm, torch.multinomial ...     0
the order of such numbers (torch.sort)    0, as of torch.randperm
dropout in a kernel, as of attention      nothing is dropped
Python's and NumPy's                      those after a seed with which shuffles exchange two samples
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from memfit.errors import UsageError
from memfit.user_lines import innermost_user_line


class ConstantDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which PyTorch's operations draw constants. Compiled modules run eagerly in it.

    Args:
        own: the generators, besides the global ones, that operations may draw from.
        share: from 0 to 1: the constant.

    >>> with ConstantDraws():
    ...     torch.randn(3).tolist(), torch.randperm(3).tolist()
    ([0.5, 0.5, 0.5], [0, 0, 0])
    """

    def __init__(self, own: Iterable[Any] = (), share: float = 0.5) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own, self.share = (*own,), share
        self.were_drawn = False
        """Whether a constant stood for a number."""
        known = (torch.default_generator, *torch.cuda.default_generators, *self.own)
        # Operations are dispatched with other Python objects for the same generators.
        self._known = {
            each._cdata  # type: ignore[attr-defined]
            for each in known
            if isinstance(each, torch.Generator)
        }

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and fill what it has drawn."""
        if torch.Tag.nondeterministic_seeded not in function.tags:
            result = function(*args, **(kwargs or {}))
            if function.overloadpacket in _ORDERS and _has_no_order(args[0]):
                result[1].zero_()
            return result
        arguments = {each.name: each.type for each in function._schema.arguments}
        given = {**dict(zip(arguments, args, strict=False)), **(kwargs or {})}
        if (used := given.get("generator")) is not None and used._cdata not in self._known:
            raise UsageError(
                f"batch_slices: the model's forward draws at {innermost_user_line()} from a torch.Generator "
                "that memfit does not find among the attributes of its modules, and so cannot put back to "
                "draw the same again. Make it an attribute of the module that draws "
                "(self.generator = ...), draw from the global generator, or leave out batch_slices."
            )
        probabilities = ("p",) if function is torch.ops.aten.native_dropout.default else _DROPOUT
        for name in probabilities:
            if isinstance(arguments.get(name), torch.FloatType):
                return function(**{**given, name: 0.0})
        self.were_drawn = True
        low, high = (given.get(name, given.get(other)) for name, other in (("low", "from"), ("high", "to")))
        whole = 0 if high is None else (low or 0) + int(self.share * (high - (low or 0)))
        return tree_map_only(torch.Tensor, lambda each: _filled(each, self.share, whole), function(**given))


_DROPOUT = ("dropout_p", "dropout")
_ORDERS = (torch.ops.aten.sort, torch.ops.aten.topk)
_SEED = 2
"""After it, the first ``shuffle`` of two items exchanges them, and so does NumPy's ``permutation``."""


def seed_shuffles() -> None:
    """Have Python's and NumPy's shuffles exchange two samples: a model that mixes them so is then seen to."""
    random.seed(_SEED)
    np.random.seed(_SEED)  # noqa: NPY002 - the generator that models draw from


def _has_no_order(numbers: torch.Tensor) -> bool:
    if numbers.numel() < 2 or not numbers.is_floating_point():  # noqa: PLR2004
        return False
    return bool((numbers == numbers.flatten()[0]).all())


def _filled(drawn: torch.Tensor, share: float, whole: int) -> torch.Tensor:
    if drawn.dtype == torch.bool:
        return drawn.fill_(share >= 0.5)  # noqa: PLR2004
    return drawn.fill_(share if drawn.is_floating_point() or drawn.is_complex() else whole)
