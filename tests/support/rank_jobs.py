"""The networks, data, losses and engines of the jobs that ranks train in tests."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import memfit


class Block(nn.Module):
    """Sizes that neither two nor four ranks divide."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 11)
        self.down = nn.Linear(11, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(6, 7)
        self.layers = nn.ModuleList(Block(7) for _ in range(3))
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        x = self.inside(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(dtype="float32"):
    torch.manual_seed(0)
    return Net().to(getattr(torch, dtype))


def samples(size, seed, dtype="float32"):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
    return x, torch.randint(5, (size,), generator=generator)


def shares(sizes, seed, dtype="float32"):
    """Return a batch divided among ranks; a share of size 0 is None."""
    batch = samples(sum(sizes), seed, dtype)
    parts = zip(*(tensor.split(sizes) for tensor in batch), strict=True)
    return [part if len(part[0]) else None for part in parts]


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def token_loss(model, batch):
    """Samples of class 0 are no tokens: the ranks' micro-batches weigh differently."""
    kept = batch[1] != 0
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * kept).sum(), kept.sum()


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def local(tensor):
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


class Seen(memfit.Callback):
    """Keeps the gradients that the optimizer sees, whole."""

    def __init__(self):
        self.gradients = []

    def on_optimizer_step_begin(self, engine):
        pairs = engine.model.named_parameters()
        self.gradients.append(
            {name.removeprefix("module."): whole(p.grad) for name, p in pairs if p.grad is not None}
        )


def sgd(parameters):
    # Adam divides by the gradient's size, which magnifies rounding where a gradient is near zero.
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def engine(model, plan, *, loss=mean_loss, **options):
    return memfit.Engine(model, plan, optimizer=options.pop("optimizer", sgd), loss=loss, **options)


def found(run, results, seen):
    named = run.model.named_parameters()
    if any(hasattr(result.grad_norm_tensor, "full_tensor") for result in results):
        raise AssertionError  # reading it would be collective
    return {
        "parameters": {name.removeprefix("module."): whole(p) for name, p in named},
        "buffers": {name.removeprefix("module."): b.clone() for name, b in run.model.named_buffers()},
        "gradients": seen.gradients,
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "updated": [result.updated for result in results],
        "scales": [result.loss_scale for result in results],
        "steps": [(result.micro_step, result.optimizer_step, result.retried) for result in results],
    }
