"""Train an MPT with FullyShardedDataParallel as Composer sets it up: bfloat16, gradients too, no checkpointing."""

import argparse
import math
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel

SIZES = {  # width, heads, layers
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).chunk(3, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # not cuDNN's, which PyTorch had not yet
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class MPT(nn.Module):
    def __init__(self, width, heads, layers, vocabulary, length):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class DecoupledAdamW(torch.optim.Optimizer):
    """Composer's: one parameter after the other, whose count of steps the host reads from the GPU."""

    @torch.no_grad()
    def step(self):
        parameters = [
            each for group in self.param_groups for each in group["params"] if each.grad is not None
        ]
        for each in parameters:
            if each not in self.state:
                self.state[each] = [torch.zeros((), device=each.device), *map(torch.zeros_like, (each, each))]
            self.state[each][0] += 1
        for each in parameters:
            steps, mean, squares = self.state[each]
            steps = steps.item()
            mean.mul_(0.9).add_(each.grad, alpha=0.1)
            squares.mul_(0.95).addcmul_(each.grad, each.grad, value=0.05)
            scale = (squares.sqrt() / math.sqrt(1 - 0.95**steps)).add_(1e-8)
            each.addcdiv_(mean, scale, value=-self.defaults["lr"] / (1 - 0.9**steps))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of a rank at a time")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=50368)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    model = FullyShardedDataParallel(
        MPT(*SIZES[args.size], args.vocabulary, args.sequence),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        mixed_precision=MixedPrecision(torch.bfloat16),
        device_id=torch.cuda.current_device(),
        use_orig_params=True,
    )
    optimizer = DecoupledAdamW(model.parameters(), {"lr": 1e-4})

    for _ in range(args.steps):
        for _ in range(args.accumulation):
            text = torch.randint(args.vocabulary, (args.batch_size, args.sequence + 1), device="cuda")
            logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            (loss / args.accumulation).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
