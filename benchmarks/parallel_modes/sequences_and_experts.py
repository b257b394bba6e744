"""Context parallelism, and experts on other ranks."""

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from jobs import LENGTH, WIDTH, Block, calls, run_variant, updates
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel


def context(device, recompute=False):
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,))
    model = Block().to(device, torch.bfloat16)
    for _ in updates(torch.optim.AdamW(model.parameters())):
        x = torch.randn(2, LENGTH * ranks, WIDTH, device=device, dtype=torch.bfloat16)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            y = calls(model, x, recompute)
            y.float().square().mean().backward()


context_checkpointed = partial(context, recompute=True)


def ulysses(device):
    ranks = dist.get_world_size()
    proj = nn.Linear(WIDTH, 3 * WIDTH).to(device)
    for _ in updates(torch.optim.AdamW(proj.parameters())):
        qkv = proj(torch.randn(2, LENGTH, WIDTH, device=device)).unflatten(-1, (3, 8, -1))
        parts = [each.contiguous() for each in qkv.chunk(ranks, dim=3)]
        out = [torch.empty_like(each) for each in parts]
        dist.all_to_all(out, parts)
        q, k, v = torch.cat(out, dim=1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        (y.sum() + qkv.sum()).backward()


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, received, sent):
        ctx.splits = received, sent
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        received, sent = ctx.splits
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


class Experts(nn.Module):
    def __init__(self, counted, exchange, count, top=2):
        super().__init__()
        self.counted, self.exchange, self.count, self.top = counted, exchange, count, top
        self.ranks = dist.get_world_size()
        self.gate = nn.Linear(WIDTH, count)
        self.mine = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(count // self.ranks)
        )

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).topk(self.top)
        order = chosen.flatten().argsort()
        x_sorted = x[order // self.top]
        counts = self.counted(chosen, self.count)
        received = self.exchange(counts)
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        got = received.view(self.ranks, -1)
        arrived = AllToAll.apply(x_sorted, got.sum(1).tolist(), sent)
        per_expert = got.sum(0).tolist()
        y = torch.cat(
            [expert(each) for expert, each in zip(self.mine, arrived.split(per_expert), strict=True)]
        )
        back = AllToAll.apply(y, sent, got.sum(1).tolist())
        out = torch.zeros_like(x).index_add(0, order // self.top, back * weight.flatten()[order].unsqueeze(1))
        return x + out


def bincount(chosen, count):
    return torch.bincount(chosen.flatten(), minlength=count)


def histc(chosen, count):
    return torch.histc(chosen.flatten().float(), bins=count, min=0, max=count - 1).long()


def one_hot(chosen, count):
    return F.one_hot(chosen.flatten(), count).sum(0)


def scattered(chosen, count):
    counts = torch.zeros(count, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))


def exchanged(counts):
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    return received


def functional(counts):
    return funcol.wait_tensor(funcol.all_to_all_single(counts, None, None, dist.group.WORLD))


def gathered(counts):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    everyone = [torch.empty_like(counts) for _ in range(ranks)]
    dist.all_gather(everyone, counts)
    return torch.stack(everyone).view(ranks, ranks, -1)[:, rank].flatten()


def experts_bincount(device, counted=bincount, exchange=exchanged, recompute=False):
    model = Experts(counted, exchange, 2 * dist.get_world_size()).to(device)
    for _ in updates(torch.optim.AdamW(model.parameters())):
        x = torch.randn(4 * LENGTH, WIDTH, device=device, requires_grad=True)
        y = calls(model, x, recompute)
        y.square().mean().backward()


experts_histc = partial(experts_bincount, counted=histc)
experts_one_hot = partial(experts_bincount, counted=one_hot)
experts_scattered = partial(experts_bincount, counted=scattered)
experts_functional = partial(experts_bincount, exchange=functional)
experts_gathered = partial(experts_bincount, exchange=gathered)
experts_checkpointed = partial(experts_bincount, recompute=True)


if __name__ == "__main__":
    run_variant(globals())
