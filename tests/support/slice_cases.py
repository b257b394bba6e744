"""A model whose forward a case writes, and its gradients with batch slices and without."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree

from memfit import BatchSlices

LIMITS = {torch.float32: 1e-6, torch.float64: 1e-12}
WIDTH, CLASSES = 6, 5


class Of(nn.Module):
    """A model with layers, and a forward that the case writes."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.written = forward
        self.position, self.kind = (nn.Parameter(torch.randn(1, 4, WIDTH)) for _ in range(2))
        self.up, self.norm, self.head = nn.Linear(WIDTH, 9), nn.LayerNorm(9), nn.Linear(9, CLASSES)
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.written(self, *args, **kwargs)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.up(x))))


@dataclass
class Registered:
    logits: torch.Tensor
    note: str


_pytree.register_dataclass(Registered)
Pair = namedtuple("Pair", "logits features")  # noqa: PYI024


@dataclass
class Case:
    """A model's forward, what it is passed, and the loss of its output."""

    forward: Callable[..., Any]
    args: Callable[[int], Any] = lambda n: (torch.randn(n, 4, WIDTH),)
    loss: Callable[[Any], torch.Tensor] = lambda out: out.square().mean()
    layers: Callable[[], dict[str, nn.Module]] = dict
    dim: int = 0
    samples: int = 7
    prepare: Callable[[nn.Module], Any] = lambda _: None
    kwargs: Callable[[int], dict[str, Any]] = lambda _: {}


def labels(n: int) -> torch.Tensor:
    wanted = torch.randint(CLASSES, (n, 4))
    wanted[torch.rand(n, 4) < 0.4] = -100
    wanted[:, 0] = 1
    return wanted


def images(n: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(n, 3, 8, 8),)


def with_labels(n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(n, 4, WIDTH), labels(n)


def with_few_labels(n: int) -> tuple[torch.Tensor, ...]:
    x, wanted = with_labels(n)
    wanted[2:5] = -100
    return x, wanted


def with_no_labels_first(n: int) -> tuple[torch.Tensor, ...]:
    x, wanted = with_labels(n)
    wanted[:3] = -100
    return x, wanted


def with_no_labels(n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(n, 4, WIDTH), torch.full((n, 4), -100)


def entropy(**options: Any) -> Callable[..., torch.Tensor]:
    return lambda self, x, y: F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten(), **options)


def by_token(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten(), reduction="none", ignore_index=-100)


def masked_mean(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y != -100).to(x.dtype)
    return (self.logits(x).square().mean(-1) * mask).sum() / mask.sum()


def counted(divisor: Callable[[torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
    """Return a loss that is divided by what is made of the number of targets."""
    return lambda self, x, y: (
        (self.logits(x).square().mean(-1) * (y != -100)).sum() / divisor((y != -100).to(x.dtype).sum())
    )


def mean_of_counted(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return self.logits(x)[y != -100].square().mean()


def attend(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return self.logits(self.attention(x, x, x, attn_mask=mask)[0])


def cached(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Return logits under a causal mask that the first call keeps, as nn.Transformer's examples do."""
    if getattr(self, "mask", None) is None or self.mask.size(0) != x.size(1):
        self.mask = torch.ones(x.size(1), x.size(1)).triu(1).bool()
    return attend(self, x, self.mask)


def same(loss: Any) -> Any:
    return loss


def attention() -> dict[str, nn.Module]:
    return {"attention": nn.MultiheadAttention(WIDTH, 2, batch_first=True)}


def recurrent(kind: type[nn.RNNBase]) -> Case:
    return Case(
        lambda self, x: self.logits(self.rnn(x)[0]),
        lambda n: (torch.randn(5, n, WIDTH),),
        layers=lambda: {"rnn": kind(WIDTH, WIDTH, 2)},
        dim=1,
    )


def tied(model: Any) -> None:
    model.other.weight = model.up.weight


def frozen(model: Any) -> None:
    model.up.requires_grad_(False)
    model.position.requires_grad_(False)


def trained(
    case: Case, slices: BatchSlices | None, dtype: torch.dtype
) -> tuple[float, list[torch.Tensor | None]]:
    """Return the loss, and the gradients of two backward passes."""
    torch.manual_seed(3)
    model = Of(case.forward, **case.layers()).to(dtype)
    case.prepare(model)
    args, kwargs = case.args(case.samples), case.kwargs(case.samples)
    args, kwargs = _pytree.tree_map_only(
        torch.Tensor,
        lambda each: (
            each.detach().to(dtype).requires_grad_(each.requires_grad) if each.is_floating_point() else each
        ),
        (args, kwargs),
    )
    undo = slices.apply(model) if slices else None
    total = 0.0
    for _ in range(2):
        loss = case.loss(model(*args, **kwargs))
        loss.backward()
        total += loss.item()
    if undo:
        undo()
    leaves = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    return total, [each.grad for each in (*model.parameters(), *leaves)]


def expect_equal(ours: Any, plain: Any, limit: float) -> None:
    (loss, gradients), (wanted, others) = ours, plain
    assert loss == pytest.approx(wanted, rel=limit, abs=limit, nan_ok=True)
    assert [each is None for each in gradients] == [each is None for each in others]
    pairs = [pair for pair in zip(gradients, others, strict=True) if pair[0] is not None]
    off = sum((one.double() - other.double()).square().sum() for one, other in pairs)
    size = sum(other.double().square().sum() for _, other in pairs)
    assert off <= limit**2 * size, float((off / size) ** 0.5)
