"""Learn features that are whitened, with weights of low rank: SVD, Cholesky and triangular solves in the loss."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=2048)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--rank", type=int, default=64)
args = parser.parse_args()

torch.manual_seed(0)
device = torch.device("cuda")


class LowRankLinear(nn.Module):
    """A linear layer as the product of two thin ones, cut from a full one by its singular values."""

    def __init__(self, full: nn.Linear, rank: int):
        super().__init__()
        u, s, vh = torch.linalg.svd(full.weight.detach(), full_matrices=False)
        self.up = nn.Parameter(u[:, :rank] * s[:rank].sqrt())
        self.down = nn.Parameter(s[:rank].sqrt()[:, None] * vh[:rank])
        self.bias = full.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.down.T @ self.up.T + self.bias


def whitening_loss(features: torch.Tensor) -> torch.Tensor:
    """Distance to the features whitened by the Cholesky factor of their covariance."""
    centred = features - features.mean(dim=0)
    covariance = centred.T @ centred / (len(features) - 1)
    eye = torch.eye(len(covariance), device=covariance.device)
    factor = torch.linalg.cholesky(covariance + 1e-3 * eye)
    whitened = torch.linalg.solve_triangular(factor, centred.T, upper=False).T
    return (centred - whitened).square().mean()


model = nn.Sequential(
    LowRankLinear(nn.Linear(args.width, args.width).to(device), args.rank),
    nn.GELU(),
    nn.Linear(args.width, 256, device=device),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for step in range(args.steps):
    x = torch.randn(args.batch_size, args.width, device=device)
    optimizer.zero_grad()
    features = model(x)
    nuclear_norm = torch.linalg.svdvals(model[2].weight).sum()
    loss = whitening_loss(features) + 1e-4 * nuclear_norm
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}  loss {loss.item():.4f}")

print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
