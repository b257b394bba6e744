"""Fine-tune BERT for question answering on random sequences of 384 tokens, as NVIDIA's run_squad.py does.

In float32, Adam updates one parameter after the other, in single operations, and clips each gradient again. With
``--half``, the model is in float16, and a fused Adam updates a float32 copy of it, as apex.amp's level O2 does.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from data_parallel import data_parallel
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

LENGTH = 384


class Layer(nn.Module):
    """A layer of BERT on length x batch x width, whose heads are views without copies."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, eps=1e-12) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def attention(self, x, mask):
        length, batch, width = x.shape
        size = width // self.heads
        q, k, v = (
            part(x).view(length, batch * self.heads, size) for part in (self.query, self.key, self.value)
        )
        scores = torch.bmm(q.transpose(0, 1), k.permute(1, 2, 0)).view(batch, self.heads, length, length)
        scores = scores / math.sqrt(size) + mask
        weights = self.dropout(scores.softmax(-1)).view(batch * self.heads, length, length)
        return torch.bmm(weights, v.transpose(0, 1)).transpose(0, 1).contiguous().view(length, batch, width)

    def forward(self, x, mask):
        x = self.ln_1(self.dropout(self.out(self.attention(x, mask))) + x)
        return self.ln_2(self.dropout(self.down(F.gelu(self.up(x), approximate="tanh"))) + x)


class Bert(nn.Module):
    """BERT with logits of where the answer starts and ends; its pooler runs, and nothing uses what it gives."""

    def __init__(self, width, layers, heads):
        super().__init__()
        sizes = (30528, 512, 2)
        self.tokens, self.positions, self.segments = (nn.Embedding(size, width) for size in sizes)
        self.ln, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.pooler, self.answer = nn.Linear(width, width).requires_grad_(False), nn.Linear(width, 2)

    def forward(self, tokens, segments, mask):
        seen = mask.unsqueeze(1).unsqueeze(2).to(self.tokens.weight.dtype)
        seen = (1.0 - seen) * -10000.0
        at = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0).expand_as(tokens)
        x = self.tokens(tokens) + self.positions(at) + self.segments(segments)
        x = self.dropout(self.ln(x)).transpose(0, 1)
        for layer in self.layers:
            x = layer(x, seen)
        x = x.transpose(0, 1).contiguous()
        self.pooler(x[:, 0]).tanh()
        first, last = self.answer(x).float().split(1, dim=-1)
        return first.squeeze(-1), last.squeeze(-1)


class BertAdam(torch.optim.Optimizer):
    """Adam in single operations, which clips the gradient of every parameter by its own norm."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state, gradient = self.state[weight], weight.grad
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(weight), torch.zeros_like(weight)
                nn.utils.clip_grad_norm_(weight, 1.0, foreach=False)
                mean, square = state["mean"], state["square"]
                mean.mul_(0.9).add_(gradient, alpha=0.1)
                square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                update = mean / (square.sqrt() + 1e-6)
                if group["weight_decay"]:
                    update += group["weight_decay"] * weight
                weight.add_(-(group["lr"] * update))


class MasterAdam:
    """A fused Adam on a float32 copy of a float16 model."""

    def __init__(self, groups, lr):
        self.weights = [weight for group in groups for weight in group["params"]]
        for group in groups:
            group["params"] = [weight.detach().float() for weight in group["params"]]
        self.masters = [weight for group in groups for weight in group["params"]]
        self.adam = torch.optim.AdamW(groups, lr=lr, fused=True)
        self.overflow = torch.zeros(1, dtype=torch.int32, device="cuda")

    def backward(self, loss):
        for weight in self.weights:
            weight.grad = None
        (loss.float() * 2**16).backward()
        self.overflow.zero_()
        for master in self.masters:
            master.grad = torch.empty_like(master)
        # apex unscales in this pass; here, clipping does.
        torch._foreach_copy_([each.grad for each in self.masters], [each.grad for each in self.weights])
        self.overflow.item()

    @torch.no_grad()
    def step(self):
        self.adam.step()
        torch._foreach_copy_(self.weights, self.masters)
        for master in self.masters:
            master.grad = None

    def zero_grad(self):
        for weight in self.weights:
            weight.grad.zero_()


def clip(weights, scale):
    """Divide all gradients by their norm; they are ``scale`` times too large."""
    gradients = [weight.grad for weight in weights]
    norm = nn.utils.get_total_norm(gradients).item() / scale
    torch._foreach_mul_(gradients, 1 / (norm + 1e-6) / scale)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--base", action="store_true", help="BERT base instead of large")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--as-in-2022", action="store_true", dest="old", help="zero_grad fills with zeros")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    torch.backends.cuda.matmul.allow_tf32 = True
    with torch.device("cuda"):
        model = Bert(768, 12, 12) if args.base else Bert(1024, 24, 16)
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    plain = [weight for name, weight in trained if name.endswith("bias") or ".ln" in f".{name}"]
    decayed = [weight for name, weight in trained if not (name.endswith("bias") or ".ln" in f".{name}")]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    if args.half:
        model.half()
    optimizer = MasterAdam(groups, 3e-5) if args.half else BertAdam(groups, 3e-5)
    model = data_parallel(model.train())
    samples = (args.steps * args.batch_size,)
    data = TensorDataset(
        torch.randint(30522, (*samples, LENGTH)),
        torch.ones(*samples, LENGTH, dtype=torch.int64),
        torch.zeros(*samples, LENGTH, dtype=torch.int64),
        torch.randint(LENGTH, samples),
        torch.randint(LENGTH, samples),
    )

    for batch in DataLoader(data, sampler=RandomSampler(data), batch_size=args.batch_size):
        tokens, mask, segments, first, last = (part.to("cuda") for part in batch)
        starts, ends = model(tokens, segments, mask)
        losses = [
            F.cross_entropy(logits, where.clamp_(0, LENGTH), ignore_index=LENGTH)
            for logits, where in ((starts, first), (ends, last))
        ]
        loss = (losses[0] + losses[1]) / 2
        if args.half:
            optimizer.backward(loss)
            clip(optimizer.masters, 2**16)
            optimizer.step()
            optimizer.zero_grad()
        else:
            loss.backward()
            clip([weight for _, weight in trained], 1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not args.old)
        loss.item()

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
