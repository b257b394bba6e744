"""Train a 3.4 B decoder in data parallel, as a student of a course on language models wrote it by hand.

    memfit dry-run --nproc 2 benchmarks/accuracy/data_parallel.py zero1 --bf16 --batch 2

`ddp` sums each gradient over the ranks as soon as it is there; `zero1` also deals the parameters out to the
ranks' optimizers, in turn, and broadcasts them after each step. Prints what is allocated in each phase, the most
of all steps. Which tensors a function still refers to when it returns matters: names are assigned as in the
original.
"""

import argparse
import contextlib
import math
import os

import torch
import torch.distributed as dist
from torch import nn

WIDTH, HIDDEN, LAYERS, HEADS, VOCABULARY, CONTEXT = 2560, 10240, 32, 32, 10000, 512
STEPS = 25  # five to warm up and twenty timed; all of them count


class Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs).normal_(std=0.02))

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width).normal_())

    def forward(self, tokens):
        return self.weight[tokens, :]


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class Rotation(nn.Module):
    def __init__(self, width):
        super().__init__()
        angles = torch.arange(CONTEXT)[:, None] * 10000.0 ** -(torch.arange(0, width, 2) / width)
        self.register_buffer("cos_sin", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, x):
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.cos_sin[:, : x.shape[-2]].unbind(0)
        return torch.cat((cos * first - sin * second, sin * first + cos * second), -1)


def softmax(scores):
    shifted = scores - torch.max(scores, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(shifted)
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


def attend(q, k, v, mask):
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


class Attention(nn.Module):
    def __init__(self, rotation):
        super().__init__()
        self.q, self.k, self.v, self.out = (Linear(WIDTH, WIDTH) for _ in range(4))
        self.rotation = rotation

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
        q = self.rotation(q)
        k = self.rotation(k)
        at = torch.arange(x.shape[1], device=x.device)
        mask = (at[:, None] >= at)[None]
        heads = attend(q, k, v, mask)
        heads = heads.transpose(1, 2).flatten(-2).contiguous()
        return self.out(heads)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.down, self.up = Linear(WIDTH, HIDDEN), Linear(HIDDEN, WIDTH), Linear(WIDTH, HIDDEN)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


def silu(x):
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, rotation):
        super().__init__()
        self.attention, self.feed_forward = Attention(rotation), FeedForward()
        self.norm1, self.norm2 = RMSNorm(WIDTH), RMSNorm(WIDTH)

    def forward(self, x):
        attended = self.attention(self.norm1(x))
        x = x + attended
        fed = self.feed_forward(self.norm2(x))
        return x + fed


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = Embedding(VOCABULARY, WIDTH)
        self.rotation = Rotation(WIDTH // HEADS)
        self.layers = nn.ModuleList(Block(self.rotation) for _ in range(LAYERS))
        self.norm, self.head = RMSNorm(WIDTH), Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def cross_entropy(logits, targets):
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def log_softmax(x):
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


class AdamW(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                grad, state = parameter.grad.data, self.state[parameter]
                parameter.data -= 1e-5 * parameter.data
                before_m = state.get("m", torch.zeros_like(grad))
                before_v = state.get("v", torch.zeros_like(grad))
                m = 0.9 * before_m + (0.1 * grad)
                v = 0.999 * before_v + (0.001 * torch.square(grad))
                parameter.data -= 1e-3 * m / (torch.sqrt(v) + 1e-8)
                state["m"], state["v"] = m, v


class DealtOut:
    """An optimizer of every N-th parameter, which then sends them to the other ranks."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.owned = AdamW(self.parameters[dist.get_rank() :: dist.get_world_size()])

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        self.owned.step()
        with torch.no_grad():
            sent = [
                dist.broadcast(parameter, src=index % dist.get_world_size(), async_op=True)
                for index, parameter in enumerate(self.parameters)
            ]
        for work in sent:
            work.wait()


class Summed(nn.Module):
    """Each gradient is summed over the ranks when it is there."""

    def __init__(self, module):
        super().__init__()
        self.module, self.pending = module, []
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor, src=0)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter):
        parameter.grad /= dist.get_world_size()
        self.pending.append(dist.all_reduce(parameter.grad, async_op=True))

    def forward(self, tokens):
        with torch.no_grad():
            for buffer in self.module.buffers():
                dist.broadcast(buffer, src=0)
        return self.module(tokens)

    def finish(self):
        for work in self.pending:
            work.wait()
        self.pending.clear()


def train_step(model, optimizer, inputs, targets, autocast):
    torch.cuda.reset_peak_memory_stats()
    optimizer.zero_grad()
    with autocast:
        logits = model(inputs)
        loss = cross_entropy(logits, targets)
    loss.backward()
    torch.cuda.current_stream().synchronize()
    model.finish()
    torch.cuda.synchronize()
    yield "before_step", torch.cuda.memory_allocated()
    yield "forward_backward", torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    yield "after_step", torch.cuda.memory_allocated()
    yield "in_step", torch.cuda.max_memory_allocated()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("ddp", "zero1"))
    parser.add_argument("--batch", type=int, required=True, help="sequences of each rank")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = Summed(Decoder().cuda())
    torch.cuda.synchronize()
    found = {"after_model": torch.cuda.memory_allocated()}
    optimizer = DealtOut(model.parameters()) if args.mode == "zero1" else AdamW(model.parameters())
    for _ in range(STEPS):
        inputs, targets = (torch.randint(VOCABULARY, (args.batch, CONTEXT)).cuda() for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        autocast = torch.autocast("cuda", torch.bfloat16) if args.bf16 else contextlib.nullcontext()
        for name, size in train_step(model, optimizer, inputs, targets, autocast):
            found[name] = max(found.get(name, 0), size)
    for name, size in found.items():
        print(f"{name} {size / 2**20:.11f} MiB")


if __name__ == "__main__":
    main()
