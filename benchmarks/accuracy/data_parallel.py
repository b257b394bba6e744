"""Train a 3.4 B decoder in data parallel, as a student of a course on language models wrote it by hand.

    memfit dry-run --nproc 2 benchmarks/accuracy/data_parallel.py zero1 --bf16 --batch 2

`ddp` sums each gradient over the ranks as soon as it is there; `zero1` also deals the parameters out to the
ranks' optimizers, in turn, and broadcasts them after each step. `fsdp` keeps a shard of each weight of a matrix
or embedding, gathers the weight before its module needs it, forward and backward, and scatters the gradient.
Prints what is allocated in each phase, the most of all steps. Which tensors a function still refers to when it
returns matters: names are assigned as in the original.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from decoder import AdamW, Decoder, Embedding, Linear, Size, cross_entropy
from torch import nn

SIZE = Size(width=2560, hidden=10240, layers=32, heads=32, context=512)
STEPS = 25  # of the original: five to warm up and twenty timed; all of them count


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


class Shard:
    """This rank's share of a weight, and the whole weight while the ranks are gathering it."""

    def __init__(self, weight):
        self.shape, self.count = weight.shape, weight.numel()
        flat = weight.detach().flatten()
        padded = padded_to_ranks(flat)
        self.own = padded.chunk(dist.get_world_size())[dist.get_rank()].clone()
        self.whole = self.work = None

    def gather(self):
        if self.work is None:
            self.whole = torch.empty(self.own.numel() * dist.get_world_size(), device=self.own.device)
            self.work = dist.all_gather_into_tensor(self.whole, self.own, async_op=True)

    def gathered(self):
        self.gather()
        self.work.wait()
        weight = self.whole[: self.count].view(self.shape)
        self.whole = self.work = None
        return weight


def padded_to_ranks(flat):
    return nn.functional.pad(flat, (0, -flat.numel() % dist.get_world_size()))


class Order:
    """The order in which modules ran in the first step; later steps gather the next one's weight ahead."""

    def __init__(self, shards):
        self.shards, self.modules, self.known, self.position = shards, [], False, 0

    def restart(self):
        self.position = 0

    def gather_first(self):
        if self.known:
            self.shards[self.modules[0].weight].gather()

    def reach(self, module, _):
        if not self.known:
            self.modules.append(module)
        shard = self.shards[module.weight]
        weight = shard.gathered()
        self.position += 1
        if self.known and self.position < len(self.modules):
            self.shards[self.modules[self.position].weight].gather()
        with torch.no_grad():
            module.weight.data = weight


class Sharded(nn.Module):
    """Each weight of a matrix or embedding is sharded over the ranks; the others are as in `Summed`."""

    def __init__(self, module):
        super().__init__()
        self.module, self.shards = module, {}
        self.scattered, self.summed = [], []
        self.forward_order, self.backward_order = Order(self.shards), Order(self.shards)
        for child in module.modules():
            if isinstance(child, (Linear, Embedding)):
                self.shards[child.weight] = None
                child.register_forward_pre_hook(self.forward_order.reach)
                child.register_forward_hook(self.release)
                child.register_full_backward_pre_hook(self.backward_order.reach)
                child.weight.register_post_accumulate_grad_hook(self.scatter)
        with torch.no_grad():
            for parameter in module.parameters():
                dist.broadcast(parameter, src=0)
                if parameter in self.shards:
                    self.shards[parameter] = Shard(parameter)
                    parameter.data = self.shards[parameter].own
                else:
                    parameter.register_post_accumulate_grad_hook(self.sum)
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)

    def release(self, module, _, __):
        with torch.no_grad():
            module.weight.data = self.shards[module.weight].own

    def scatter(self, parameter):
        shard = self.shards[parameter]
        flat = parameter.grad.detach().flatten()
        padded = padded_to_ranks(flat)
        padded /= dist.get_world_size()
        own = torch.empty_like(shard.own)
        work = dist.reduce_scatter_tensor(own, padded, async_op=True)
        self.scattered.append((parameter, own, work))
        with torch.no_grad():
            parameter.grad = None
            parameter.data = shard.own

    def sum(self, parameter):
        parameter.grad /= dist.get_world_size()
        self.summed.append(dist.all_reduce(parameter.grad, async_op=True))

    def forward(self, tokens):
        self.forward_order.restart()
        self.backward_order.restart()
        self.forward_order.gather_first()
        logits = self.module(tokens)
        self.forward_order.known = True
        self.backward_order.gather_first()
        return logits

    def finish(self):
        with torch.no_grad():
            for parameter, own, work in self.scattered:
                work.wait()
                parameter.grad = own
            for work in self.summed:
                work.wait()
        self.scattered.clear()
        self.summed.clear()
        self.backward_order.known = True


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
    parser.add_argument("mode", choices=("ddp", "zero1", "fsdp"))
    parser.add_argument("--batch", type=int, required=True, help="sequences of each rank")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.cuda.reset_peak_memory_stats()
    model = (Sharded if args.mode == "fsdp" else Summed)(Decoder(SIZE).cuda())
    torch.cuda.synchronize()
    found = {"after_model": torch.cuda.memory_allocated(), "in_model": torch.cuda.max_memory_allocated()}
    optimizer = DealtOut(model.parameters()) if args.mode == "zero1" else AdamW(model.parameters())
    for _ in range(args.steps):
        inputs, targets = (
            torch.randint(SIZE.vocabulary, (args.batch, SIZE.context)).cuda() for _ in range(2)
        )
        dist.barrier()
        torch.cuda.synchronize()
        autocast = torch.autocast("cuda", torch.bfloat16) if args.bf16 else contextlib.nullcontext()
        for name, size in train_step(model, optimizer, inputs, targets, autocast):
            found[name] = max(found.get(name, 0), size)
    for name, size in found.items():
        print(f"{name} {size / 2**20:.11f} MiB")


if __name__ == "__main__":
    main()
