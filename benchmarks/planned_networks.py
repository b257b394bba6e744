"""Networks to plan for: sizes at which a step takes about a second on one thread.

    memfit plan --budget 1GiB benchmarks/planned_networks.py gpt [--batch-size 4]

trains one of them on the GPU, for planning.py.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Network:
    """A model, a batch, and what is trained on it."""

    model: nn.Module
    inputs: torch.Tensor
    targets: torch.Tensor
    loss: Loss
    blocks: str
    """The pattern of its repeated blocks."""


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int, heads: int, *, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the feed-forward."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """The GPT of the table in docs/benchmarks.md."""

    def __init__(self, dropout: float = 0.0, width: int = 512, vocabulary: int = 2048) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, 8, dropout=dropout, causal=True) for _ in range(8))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the head gets."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.hidden(tokens))


class Vit(nn.Module):
    """A small vision transformer."""

    def __init__(self, width: int = 384, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(torch.zeros(1, 196, width))
        self.blocks = nn.ModuleList(Block(width, 6, dropout=0.0, causal=False) for _ in range(8))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def _convolutions(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        *(
            nn.Conv2d(inside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
        ),
        *(nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside)),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """A U-Net of four levels."""

    def __init__(self, width: int = 24, classes: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        self.down = nn.ModuleList(map(_convolutions, [3, *widths[:-1]], widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * each, each, 2, stride=2) for each in reversed(widths[:-1])
        )
        self.joined = nn.ModuleList(_convolutions(2 * each, each) for each in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of each pixel."""
        skipped = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else functional.max_pool2d(x, 2))
            skipped.append(x)
        skipped.pop()
        for up, block in zip(self.up, self.joined, strict=True):
            x = block(torch.cat([skipped.pop(), up(x)], dim=1))
        return self.head(x)


class LstmModel(nn.Module):
    """A language model of LSTM layers."""

    def __init__(self, vocabulary: int = 4096, width: int = 384, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


def _classes(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(inputs), targets)


def _next_tokens(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _gpt(dropout: float = 0.0) -> Network:
    tokens, targets = torch.randint(2048, (4, 512)), torch.randint(2048, (4, 512))
    return Network(Gpt(dropout), tokens, targets, _next_tokens, "blocks.*")


def _resnet50() -> Network:
    import torchvision

    images, labels = torch.randn(8, 3, 128, 128), torch.randint(1000, (8,))
    return Network(torchvision.models.resnet50(), images, labels, _classes, "layer?.*")


def _vit() -> Network:
    return Network(Vit(), torch.randn(8, 3, 224, 224), torch.randint(1000, (8,)), _classes, "blocks.*")


def _unet() -> Network:
    images, masks = torch.randn(4, 3, 128, 128), torch.randint(4, (4, 128, 128))
    return Network(UNet(), images, masks, _classes, "down.*")


def _lstm() -> Network:
    tokens, targets = torch.randint(4096, (16, 128)), torch.randint(4096, (16, 128))
    return Network(LstmModel(), tokens, targets, _next_tokens, "layers.*")


NETWORKS: dict[str, Callable[[], Network]] = {
    "gpt": _gpt,
    "resnet50": _resnet50,
    "unet": _unet,
    "vit": _vit,
    "lstm": _lstm,
    "gpt-dropout": partial(_gpt, 0.1),
}


def main() -> None:
    """Train a network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)
    network = NETWORKS[options.network]()
    model = network.model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.arange(options.batch_size or len(network.inputs)) % len(network.inputs)
    for _ in range(options.steps):
        optimizer.zero_grad()
        network.loss(model, network.inputs[batch].to("cuda"), network.targets[batch].to("cuda")).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
