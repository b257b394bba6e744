"""Train layers of a Llama on eight cards as Megatron-LM does with TransformerEngine, without a pipeline.

Weights are in bfloat16; products add their gradients to float32 buffers. Tensor parallel ranks also share the
sequence. The others are data parallel, each with a part of the optimizer; with ``--context`` they share the
sequence as well, and exchange heads for attention.
"""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh

SIZES = {"70b": (8192, 64, 8, 28672), "405b": (16384, 128, 16, 53248)}  # width, heads, heads of keys, hidden
HEAD = 128
PIECE = 2**28


def gather(x, group, async_op=False):
    if group.size() == 1:
        return x, None
    whole = x.new_empty(group.size() * len(x), *x.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, x, group=group, async_op=async_op)


def scatter(x, group, async_op=False):
    if group.size() == 1:
        return x, None
    part = x.new_empty(len(x) // group.size(), *x.shape[1:])
    return part, dist.reduce_scatter_tensor(part, x, group=group, async_op=async_op)


@functools.cache
def unused_gradient(shape):
    return torch.empty(shape, device="cuda")


class Scatter(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scatter(x, group)[0]

    @staticmethod
    def backward(ctx, grad):
        return gather(grad.contiguous(), ctx.group)[0], None


class Product(Function):
    """Of gathered rows with a part of a weight; ``group`` is None where each rank has all rows."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return (gather(x, group)[0] if group else x) @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x, weight), group, work = ctx.saved_tensors, ctx.group, None
        if group:
            x, work = gather(x, group, async_op=True)
        inner = grad @ weight
        if work:
            work.wait()
            inner, work = scatter(inner, group, async_op=True)
        total = weight.main_grad
        torch.addmm(total, grad.t(), x, out_dtype=torch.float32, out=total)
        if work:
            work.wait()
        return inner, unused_gradient(weight.shape).detach(), None


class Exchange(Function):
    """Between a part of the sequence with all heads and the whole sequence with a part of the heads."""

    @staticmethod
    def forward(ctx, x, group, orders, to_heads):
        ctx.rest = group, orders, not to_heads
        return Exchange.exchanged(x, *ctx.rest[:2], to_heads)

    @staticmethod
    def backward(ctx, grad):
        return Exchange.exchanged(grad, *ctx.rest), None, None, None

    @staticmethod
    def exchanged(x, group, orders, to_heads):
        ranks, (length, heads, _) = group.size(), x.shape
        halves = (2 * ranks, -1, heads if not to_heads else heads // ranks, HEAD)
        if to_heads:
            sent = x.reshape(length, ranks, -1, HEAD).movedim(1, 0).contiguous()
        else:
            sent = x.reshape(halves).index_select(0, orders[1]).view(ranks, -1, heads, HEAD)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        if to_heads:
            return received.view(halves).index_select(0, orders[0]).view(-1, heads // ranks, HEAD)
        return received.movedim(0, 1).reshape(-1, ranks * heads, HEAD)


class ParallelLoss(Function):
    """Cross-entropy over parts of the vocabulary; the gradient takes the place of the logits."""

    @staticmethod
    def forward(ctx, logits, targets, begin, group):
        targets = targets - begin
        inside = (targets >= 0) & (targets < logits.shape[1])
        targets = (targets * inside).unsqueeze(1)
        top, at = logits.max(1, keepdim=True)
        chosen = logits.gather(1, targets)[:, 0].float() * inside
        torch.softmax(logits, 1, out=logits)
        mine = torch.stack((top[:, 0].float(), 1 / logits.gather(1, at)[:, 0].float(), chosen))
        tops, sums, chosen = gather(mine.unsqueeze(0), group)[0].unbind(1)
        top = tops.amax(0)
        total = (sums * (tops - top).exp()).sum(0)
        share = mine[1] * (mine[0] - top).exp() / total
        ctx.save_for_backward(logits, share, targets, inside)
        return total.log() + top - chosen.sum(0)

    @staticmethod
    def backward(ctx, grad):
        logits, share, targets, inside = ctx.saved_tensors
        logits.mul_((grad * share).unsqueeze(1))
        logits.scatter_add_(1, targets, -(grad * inside).unsqueeze(1).to(logits.dtype))
        return logits, None, None, None


@torch.compile(dynamic=False)
def swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@torch.compile(dynamic=False)
def rotated(x, cos, sin):
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def weight(rows, columns):
    return nn.Parameter(torch.empty(rows, columns).normal_(std=0.008))


class Layer(nn.Module):
    def __init__(self, args, tensor, context):
        super().__init__()
        width, heads, keys, hidden = SIZES[args.size]
        self.tensor, self.context = tensor, context
        self.heads, self.keys, hidden = heads // args.tensor, keys // args.tensor, hidden // args.tensor
        self.norm_1, self.norm_2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.qkv, self.out = (
            weight((self.heads + 2 * self.keys) * HEAD, width),
            weight(width, self.heads * HEAD),
        )
        self.up, self.down = weight(2 * hidden, width), weight(width, hidden)

    def forward(self, x, cos, sin, orders):
        found = Product.apply(self.norm_1(x), self.qkv, self.tensor)
        grouped = found.view(len(found), self.keys, -1, HEAD)
        parts = grouped.split((self.heads // self.keys, 1, 1), dim=2)
        q, k, v = (part.reshape(len(found), -1, HEAD) for part in parts)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if self.context:
            q, k, v = (Exchange.apply(each, self.context, orders, True) for each in (q, k, v))
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
        found = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            .squeeze(0)
            .transpose(0, 1)
        )
        if self.context:
            found = Exchange.apply(found, self.context, orders, False)
        x = x + Scatter.apply(Product.apply(found.reshape(len(found), -1), self.out, None), self.tensor)
        hidden = swiglu(Product.apply(self.norm_2(x), self.up, self.tensor))
        return x + Scatter.apply(Product.apply(hidden, self.down, None), self.tensor)


class Llama(nn.Module):
    def __init__(self, args, tensor, context):
        super().__init__()
        width, unit = SIZES[args.size][0], 128 * args.tensor
        self.tensor, self.part = tensor, -(-128257 // unit) * 128
        self.begin = self.part * tensor.rank()
        self.tokens, self.head = weight(self.part, width), weight(self.part, width)
        self.layers = nn.ModuleList(Layer(args, tensor, context) for _ in range(args.layers))
        self.norm = nn.RMSNorm(width, 1e-5)

    def forward(self, tokens, targets, *places):
        tokens = tokens - self.begin
        outside = (tokens < 0) | (tokens >= self.part)
        x = F.embedding(tokens.masked_fill(outside, 0), self.tokens)
        if self.tensor.size() > 1:
            x = Scatter.apply(x.masked_fill(outside.unsqueeze(1), 0), self.tensor)
        for layer in self.layers:
            x = layer(x, *places)
        logits = Product.apply(self.norm(x), self.head, self.tensor)
        return ParallelLoss.apply(logits, targets, self.begin, self.tensor)


def take_gradient(parameter, is_added):
    if not is_added:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share weights")
    parser.add_argument("--context", action="store_true", help="the others share the sequence")
    parser.add_argument("--micro-batches", type=int, default=4, help="of one sequence each")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    sizes = dist.get_world_size() // args.tensor, args.tensor
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("outer", "tensor"))
    outer, tensor = mesh.get_group("outer"), mesh.get_group("tensor")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Llama(args, tensor, outer if args.context else None)
        ranks = outer.size() if args.context else 1
        chunks = torch.tensor([each for at in range(ranks) for each in (at, 2 * ranks - 1 - at)])
        orders = chunks.argsort(), chunks
        half, first = args.sequence // (2 * ranks), outer.rank() % ranks
        mine = [torch.arange(half) + half * at for at in (first, 2 * ranks - 1 - first)]
        rates = 10000.0 ** -(torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)
        angles = torch.outer(torch.cat(mine).float(), rates).unsqueeze(1)
        places = angles.cos(), angles.sin(), orders

    parameters = list(model.parameters())
    total = sum(each.numel() for each in parameters)
    share = -(-total // (128 * outer.size())) * 128
    weights = torch.empty(share * outer.size(), device="cuda")
    grads = torch.zeros(share * outer.size(), dtype=torch.float32, device="cuda")
    at = 0
    for each in parameters:
        part = slice(at, at + each.numel())
        each.data, each.main_grad = weights[part].view_as(each).copy_(each.data), grads[part].view_as(each)
        at = part.stop
        is_added = each.dim() > 1 and each is not model.tokens
        each.register_post_accumulate_grad_hook(functools.partial(take_gradient, is_added=is_added))
    norms = [each for each in parameters if each.dim() == 1]
    mine = slice(share * outer.rank(), share * (outer.rank() + 1))
    pieces = weights[mine].split(PIECE)
    main = [nn.Parameter(each.float()) for each in pieces]
    for each, grad in zip(main, grads[mine].split(PIECE), strict=True):
        each.grad = grad
    optimizer = torch.optim.AdamW(main, 2.4e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    for _ in range(args.steps):
        grads.zero_()
        for _ in range(args.micro_batches):
            text = torch.randint(128256, (args.sequence // ranks + 1,)).to("cuda")
            loss = model(text[:-1], text[1:], *places).sum() / args.sequence
            loss.isnan().item()  # Megatron stops if it is
            (loss / args.micro_batches).backward()
        grads.norm().isnan().item()
        grads.mul_(1 / outer.size())
        if outer.size() > 1:
            dist.reduce_scatter_tensor(grads[mine], grads, group=outer)
        if args.tensor > 1:
            flat = torch.cat([each.main_grad for each in norms])
            dist.all_reduce(flat, group=tensor)
            torch._foreach_copy_([each.main_grad for each in norms], flat.split(len(norms[0])))
        norm = nn.utils.get_total_norm([each.grad for each in main]) ** 2
        dist.all_reduce(norm)
        torch._foreach_mul_([each.grad for each in main], min(1.0, 1.0 / (norm.item() ** 0.5 + 1e-6)))
        optimizer.step()
        for each, piece in zip(main, pieces, strict=True):
            piece.copy_(each.detach())
        if outer.size() > 1:
            dist.all_gather_into_tensor(weights, weights[mine], group=outer)
        print(f"loss {loss.item():.4f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
