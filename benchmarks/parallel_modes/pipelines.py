"""torch.distributed.pipelining with each schedule; shapes given and inferred."""

from functools import partial

import torch
import torch.distributed as dist
from jobs import LENGTH, VOCABULARY, WIDTH, Block, Model, calls, run_variant
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)


class Part(nn.Module):
    """A stage: the embedding is in the first, the head in the last."""

    def __init__(self, stage, stages, *, checkpointed=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else None
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY) if stage == stages - 1 else None
        self.checkpointed = checkpointed

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = calls(block, x, self.checkpointed)
        return x if self.head is None else self.head(x)


def loss_fn(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def steps(schedule, parts, device, *, first, last, microbatches):
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()])
    for _ in range(3):
        text = torch.randint(VOCABULARY, (2 * microbatches, LENGTH + 1), device=device)
        arguments = (text[:, :-1],) if first else ()
        losses = []
        if last:
            schedule.step(*arguments, target=text[:, 1:], losses=losses)
        else:
            schedule.step(*arguments)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(torch.stack(losses).mean().item())


def single(device, kind, *, checkpointed=False, inferred=True):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = Part(rank, ranks, checkpointed=checkpointed).to(device)
    shapes = {}
    if not inferred:
        text = torch.zeros(2, LENGTH, dtype=torch.int64, device=device)
        hidden = torch.zeros(2, LENGTH, WIDTH, device=device, requires_grad=True)
        logits = torch.zeros(2, LENGTH, VOCABULARY, device=device, requires_grad=True)
        shapes = {
            "input_args": text if rank == 0 else hidden,
            "output_args": logits if rank == ranks - 1 else hidden,
        }
    stage = PipelineStage(part, rank, ranks, device, **shapes)
    schedule = kind(stage, n_microbatches=2 * ranks, loss_fn=loss_fn)
    steps(schedule, [part], device, first=rank == 0, last=rank == ranks - 1, microbatches=2 * ranks)


gpipe = partial(single, kind=ScheduleGPipe)
one_f_one_b = partial(single, kind=Schedule1F1B)
one_f_one_b_given = partial(single, kind=Schedule1F1B, inferred=False)
checkpointed = partial(single, kind=Schedule1F1B, checkpointed=True)


def several(device, kind, turned=False):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = rank, 2 * ranks - 1 - rank if turned else rank + ranks
    parts = [Part(each, 2 * ranks).to(device) for each in mine]
    stages = [PipelineStage(part, each, 2 * ranks, device) for part, each in zip(parts, mine, strict=True)]
    schedule = kind(stages, n_microbatches=2 * ranks, loss_fn=loss_fn)
    first, last = 0 in mine, 2 * ranks - 1 in mine
    steps(schedule, parts, device, first=first, last=last, microbatches=2 * ranks)


interleaved = partial(several, kind=ScheduleInterleaved1F1B)
zero_bubble = partial(several, kind=ScheduleInterleavedZeroBubble)
zbv = partial(several, kind=ScheduleZBVZeroBubble, turned=True)


def traced(device):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Model(ranks)
    example = torch.randint(VOCABULARY, (2, LENGTH))
    spec = {f"blocks.{each}": SplitPoint.BEGINNING for each in range(1, ranks)}
    stage = pipeline(model, mb_args=(example,), split_spec=spec).build_stage(rank, device, dist.group.WORLD)
    schedule = ScheduleGPipe(stage, n_microbatches=2 * ranks, loss_fn=loss_fn)
    steps(schedule, [stage.submod], device, first=rank == 0, last=rank == ranks - 1, microbatches=2 * ranks)


def by_hand(device):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = Part(rank, ranks).to(device)
    optimizer = torch.optim.AdamW(part.parameters())
    for _ in range(3):
        if rank == 0:
            x = torch.randint(VOCABULARY, (2, LENGTH), device=device)
        else:
            x = torch.empty(2, LENGTH, WIDTH, device=device, requires_grad=True)
            dist.recv(x.data, src=rank - 1)
        y = part(x)
        if rank < ranks - 1:
            dist.send(y.detach(), dst=rank + 1)
            grad = torch.empty_like(y)
            dist.recv(grad, src=rank + 1)
            y.backward(grad)
        else:
            y.float().square().mean().backward()
        if rank > 0:
            dist.send(x.grad, dst=rank - 1)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    run_variant(globals())
