"""Random small networks and their training data, as a hypothesis strategy.

    tokens   (samples, 4, width)    Linear, norms, attention, LSTMs, residuals, tied embeddings
    images   (samples, 4, 6, 6)     convolutions, group and batch norms, pooling

Blocks are drawn one by one; some are used twice (shared), some are residual, some work in place.
"""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

WIDTH, LENGTH, CLASSES, SIDE = 8, 4, 5, 6


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x.transpose(1, 2).flatten(2))


class InPlace(nn.Module):
    """A Linear whose result is scaled and shifted in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mul_(0.5).add_(x).tanh_()


class Recurrent(nn.Module):
    """An LSTM over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


class Residual(nn.Module):
    """A module with a skip connection."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.SiLU(inplace=True))


BLOCKS: dict[str, dict[str, Any]] = {
    "tokens": {
        "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
        "mlp": _mlp,
        "attention": Attention,
        "layer norm": lambda: nn.LayerNorm(WIDTH),
        "rms norm": lambda: nn.RMSNorm(WIDTH, eps=1e-5),
        "dropout": lambda: nn.Dropout(0.25),
        "in place": InPlace,
        "lstm": Recurrent,
    },
    "images": {
        "convolution": _convolution,
        "depthwise": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
        "group norm": lambda: nn.GroupNorm(2, 4),
        "batch norm": lambda: nn.BatchNorm2d(4),
        "pool": lambda: nn.AvgPool2d(3, stride=1, padding=1),
        "dropout": lambda: nn.Dropout2d(0.25),
        "upsample": lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.MaxPool2d(2)),
    },
}


INDIVISIBLE = {"dropout", "batch norm"}
"""Blocks that process part of a batch differently from the whole: other random numbers, other means."""

INEXACT = {"lstm"}
"""Blocks that round otherwise where no gradients are recorded: a CPU has another kernel for that."""


class Net(nn.Module):
    """The model that a ``Network`` describes.

    Blocks are an attribute so that strategies can name them: ``blocks.*``.
    """

    def __init__(self, network: "Network") -> None:
        super().__init__()
        self.tokens = network.kind == "tokens"
        self.embed = nn.Embedding(CLASSES, WIDTH) if self.tokens else nn.Conv2d(3, 4, 1)
        made = [BLOCKS[network.kind][name]() for name in network.blocks]
        made = [
            Residual(block) if residual else block
            for block, residual in zip(made, network.residual, strict=True)
        ]
        self.blocks = nn.ModuleList(made)
        self.order = [*range(len(made)), *([0] if network.shared else [])]
        self.head = nn.Linear(WIDTH if self.tokens else 4 * SIDE * SIDE, CLASSES, bias=not self.tokens)
        if self.tokens and network.tied:
            self.head.weight = self.embed.weight
        if network.frozen:
            self.embed.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x if self.tokens else x.flatten(1))


@dataclass(frozen=True)
class Network:
    """The description of a network and its batches."""

    kind: str
    blocks: tuple[str, ...]
    residual: tuple[bool, ...]
    shared: bool
    """Whether the first block is used again at the end."""
    tied: bool
    """Whether the head's weight is the embedding's."""
    frozen: bool
    """Whether the embedding is not trained."""
    samples: int
    """Samples in a batch."""
    seed: int

    def build(self, dtype: torch.dtype = torch.float32) -> Net:
        """Return the network on torch's default device, always with the same parameters."""
        torch.manual_seed(self.seed)
        return Net(self).to(torch.get_default_device(), dtype)

    def batches(
        self, count: int, dtype: torch.dtype = torch.float32
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return batches on torch's default device, the same ones at every call."""
        device = torch.get_default_device()
        generator = torch.Generator("cpu").manual_seed(self.seed + 1)
        found = []
        for _ in range(count):
            shape = (self.samples, LENGTH) if self.kind == "tokens" else (self.samples,)
            labels = torch.randint(CLASSES, shape, generator=generator, device="cpu")
            if self.kind == "tokens":
                x = torch.randint(CLASSES, shape, generator=generator, device="cpu")
            else:
                x = torch.randn(self.samples, 3, SIDE, SIDE, generator=generator, device="cpu").to(dtype)
            found.append((x.to(device), labels.to(device)))
        return found


def mean_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss over samples, and over their tokens if there are any."""
    x, labels = batch
    return F.cross_entropy(model(x).flatten(0, -2), labels.flatten())


@st.composite
def networks(draw: st.DrawFn, *, divisible: bool = False) -> Network:
    """Draw a network; ``divisible``: of blocks that process part of a batch like the whole, bits apart."""
    kind = draw(st.sampled_from(sorted(BLOCKS)))
    names = sorted(BLOCKS[kind].keys() - (INDIVISIBLE if divisible else INEXACT))
    blocks = tuple(draw(st.lists(st.sampled_from(names), min_size=1, max_size=5)))
    tied = kind == "tokens" and draw(st.booleans())
    return Network(
        kind,
        blocks,
        tuple(draw(st.booleans()) for _ in blocks),
        draw(st.booleans()),
        tied,
        not tied and draw(st.booleans()),
        draw(st.integers(4, 9)),
        draw(st.integers(0, 2**16)),
    )
