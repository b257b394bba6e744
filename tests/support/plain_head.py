"""A small head, and what ``memfit.ChunkedHead`` is compared with: the plain head's loss and gradients."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

FEATURES, CLASSES, BATCH, LENGTH = 16, 101, 3, 13
POSITIONS = BATCH * LENGTH


def case(dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    head = nn.Linear(FEATURES, CLASSES, bias=bias, dtype=dtype)
    hidden = torch.randn(BATCH, LENGTH, FEATURES, dtype=dtype, requires_grad=True)
    targets = torch.randint(CLASSES, (BATCH, LENGTH))
    return head, hidden, targets


def plain(head, hidden, targets, token_weights=None, **options):
    """What ChunkedHead stands for."""
    logits = head(hidden).flatten(0, -2)
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    flat = targets.flatten(0, -2) if targets.is_floating_point() else targets.flatten()
    if token_weights is None:
        return cross_entropy(logits, flat, **options)
    factors = token_weights.flatten()
    reduction = options.pop("reduction", "mean")
    total = (cross_entropy(logits, flat, reduction="none", **options) * factors).sum()
    weight = options.get("weight")
    counts = flat != options.get("ignore_index", -100)
    by_class = counts if weight is None else counts * weight[flat.where(counts, 0)]
    return total if reduction == "sum" else total / (by_class * factors).sum()


def gradients_of(loss, head, *inputs):
    """Return the loss and all gradients."""
    head.zero_grad()
    for each in inputs:
        each.grad = None
    loss.backward()
    tensors = (*inputs, *head.parameters())
    return [loss.detach(), *(each.grad if each.grad is None else each.grad.clone() for each in tensors)]


def error(found, expected):
    """Return the largest difference, each relative to the largest number of its tensor."""
    assert [each is None for each in found] == [each is None for each in expected]
    pairs = [(one, two) for one, two in zip(found, expected, strict=True) if one is not None]
    return max(float((one - two).abs().max() / two.abs().max().clamp(min=1e-30)) for one, two in pairs)


def ignored(targets):
    targets = targets.clone()
    targets[0, :5] = -100
    targets[1] = -100  # slices in which nothing counts
    return targets


def factors(count, dtype):
    torch.manual_seed(2)
    return torch.rand(count, dtype=dtype) + 0.5


class Largest(TorchDispatchMode):
    """Counts operations, and remembers the sizes of their results."""

    def __init__(self):
        super().__init__()
        self.calls = {}
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket] = self.calls.get(func.overloadpacket, 0) + 1
        views = {id(each.untyped_storage()) for each in args if isinstance(each, torch.Tensor)}
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor) and id(each.untyped_storage()) not in views:
                self.sizes.append(each.numel())
        return result


class Addmm(nn.Module):
    """A linear layer as transformers' Conv1D has it."""

    def __init__(self, features=FEATURES, classes=CLASSES):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, classes) / 4)
        self.bias = nn.Parameter(torch.randn(classes))

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight)
