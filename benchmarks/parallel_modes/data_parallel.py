"""DistributedDataParallel with each of its options; ZeroRedundancyOptimizer."""

from functools import partial

import torch
import torch.distributed as dist
from jobs import Model, batch, loss_of, run_variant, train, train_accumulated, updates
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    optimizer_overlap_hooks,  # noqa: F401 - scripts import it
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def wrapped(device, *, checkpointed=False, **options):
    model = Model(checkpointed=checkpointed).to(device)
    return DistributedDataParallel(model, device_ids=[device.index], **options)


def trained(device, **options):
    train(wrapped(device, **options), device)


plain = partial(trained)
checkpointed = partial(trained, checkpointed=True)
bucket_view = partial(trained, gradient_as_bucket_view=True)
static_graph = partial(trained, static_graph=True, gradient_as_bucket_view=True, checkpointed=True)
small_buckets = partial(trained, bucket_cap_mb=1)


def unused(device):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.other = Model(), Model()

        def forward(self, text):
            return self.model(text)

    model = DistributedDataParallel(Sometimes().to(device), find_unused_parameters=True)
    train(model, device)


def accumulation(device):
    train_accumulated(wrapped(device), device)


def hooked(device, hook, **options):
    model = wrapped(device, **options)
    model.register_comm_hook(None, hook)
    train(model, device)


fp16_hook = partial(hooked, hook=default_hooks.fp16_compress_hook)
bf16_hook = partial(hooked, hook=default_hooks.bf16_compress_hook, gradient_as_bucket_view=True)


def power_sgd(device):
    model = wrapped(device)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, device, steps=4)


def join(device):
    model = wrapped(device)
    with Join([model]):
        for _ in updates(torch.optim.AdamW(model.parameters())):
            loss_of(model, batch(device)).backward()


def sync_batch_norm(device):
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)
    model = DistributedDataParallel(model)
    for _ in updates(torch.optim.SGD(model.parameters(), lr=0.1)):
        x = torch.randn(4, 3, 32, 32, device=device)
        nn.functional.cross_entropy(model(x), torch.randint(10, (4,), device=device)).backward()
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 3, 32, 32, device=device))


def amp(device):
    model = wrapped(device)
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler()
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model, batch(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def redundancy(model, **options):
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, **options)


def zero(device):
    model = wrapped(device)
    train(model, device, redundancy(model))


def zero_bucket_view(device):
    model = wrapped(device, gradient_as_bucket_view=True)
    train(model, device, redundancy(model, parameters_as_bucket_view=True))


def zero_overlap(device):
    model = wrapped(device, gradient_as_bucket_view=True, static_graph=True)
    optimizer = redundancy(model, overlap_with_ddp=True)
    hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer)
    model.register_comm_hook(None, hook)
    for _ in range(6):  # the first three learn the buckets
        loss_of(model, batch(device)).backward()


def zero_consolidate(device):
    model = wrapped(device)
    optimizer = train(model, device, redundancy(model))
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save(optimizer.state_dict(), "optimizer.pt")


def local_sgd(device):
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = wrapped(device)
    state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=1)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    train(model, device, PostLocalSGDOptimizer(torch.optim.AdamW(model.parameters()), averager), steps=4)


def compiled(device, backend="aot_eager"):
    train(torch.compile(wrapped(device), backend=backend), device)


compiled_inductor = partial(compiled, backend="inductor")


def reducer_in_python(device):
    model = Model().to(device)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    for _ in updates(torch.optim.AdamW(model.parameters())):
        loss_of(model, batch(device)).backward()
        work = [dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, async_op=True) for p in model.parameters()]
        for each in work:
            each.wait()


if __name__ == "__main__":
    run_variant(globals())
