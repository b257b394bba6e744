"""Collectives of a recorded step: what NCCL is asked for, on which stream, and what waits for it."""

from collections import Counter
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest

from memfit.records import Phase
from memfit.timing.step_timeline import QueuedWork, step_timeline
from memfit.trace.trace_file import read_trace

pytestmark = pytest.mark.warm

WIDTH, BLOCKS = 64, 3
SCRIPT = f"""
    import os
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({BLOCKS}))).cuda()
"""
DDP = """
    model = nn.parallel.DistributedDataParallel(model)
"""
FSDP = """
    from torch.distributed.fsdp import fully_shard
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
"""
FSDP_1 = """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
"""
LOOP = f"""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(8, {WIDTH}, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
"""
OWN = f"""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(8, {WIDTH}, device="cuda")).sum().backward()
        works = [dist.all_reduce(each.grad, async_op=True) for each in model.parameters()]
        parts = [torch.erf(each) for each in model.parameters()]
        for work in works:
            work.wait()
        dist.all_to_all_single(parts[0], model[0].weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
"""
BYTES = 4 * BLOCKS * WIDTH**2


def step_of(dry_run, tmp_path, script):
    file = tmp_path / "run.memfit"
    dry_run(SCRIPT + script, options=("--nproc", "8", "-o", str(file)))
    trace = read_trace(Path(file))
    return trace.step, trace.labels


def collectives(step):
    """Return the place and the operation of each."""
    found = [(place, step.operations[number]) for place, number in enumerate(step.order)]
    return [(place, each) for place, each in found if each.ranks > 1]


def size(tensors):
    return sum(4 * prod(each.shape) for each in tensors)


def test_ddp_reduces_all_gradients_and_its_update_waits(dry_run, tmp_path):
    step, labels = step_of(dry_run, tmp_path, DDP + LOOP)
    found = collectives(step)
    assert {each.name for _, each in found} == {"nccl.all_reduce"}  # how it forms buckets once is left out
    assert {each.ranks for _, each in found} == {8}
    assert sum(size(each.operands) for _, each in found) == BYTES
    last = found[-1][0]
    waiting = min(place for place, before in step.after if before == last)
    assert step.operations[step.order[waiting]].stream == 0 != found[-1][1].stream
    assert labels[step.labels[waiting - 1]].phase is Phase.BACKWARD
    assert not any(step.operations[each].name.startswith("c10d") for each in step.order)
    assert step.host.hook_calls == 0


def test_fsdp_gathers_parameters_twice_ahead_and_scatters_gradients(dry_run, tmp_path):
    step, labels = step_of(dry_run, tmp_path, FSDP + LOOP)
    moved = Counter()
    for place, each in collectives(step):
        moved[each.name, labels[step.labels[place]].phase] += max(size(each.operands), size(each.results))
    block = BYTES // BLOCKS
    assert moved["nccl.all_gather", Phase.FORWARD] == BYTES
    assert moved["nccl.all_gather", Phase.BACKWARD] in (BYTES, BYTES - block)
    assert moved["nccl.reduce_scatter", Phase.BACKWARD] == BYTES
    streams = {each.name: each.stream for _, each in collectives(step)}
    assert len({0, *streams.values()}) == 3
    work = [
        QueuedWork(0.0, float(one.ranks > 1), one.stream, after=tuple(b for a, b in step.after if a == place))
        for place, one in enumerate(step.operations[number] for number in step.order)
    ]
    begins = step_timeline(work).starts
    begun = sorted(begins[place] for place, _ in collectives(step))
    assert all(later >= earlier + 1 for earlier, later in pairwise(begun))  # of one communicator, in order
    products = [place for place, number in enumerate(step.order) if step.operations[number].flops]
    forward = [place for place in products if labels[step.labels[place]].phase is Phase.FORWARD]
    assert [begins[place] for place in forward] == [1, 2, 3]  # each waits for its weights, gathered ahead
    gathered = max(place for place, each in collectives(step) if each.name == "nccl.all_gather")
    assert begins[products[BLOCKS]] < begins[gathered] + 1  # the backward's first does not wait for the last


@pytest.mark.parametrize(("shards", "counted"), [(FSDP, 3755), (FSDP_1, 3363)], ids=["2", "1"])
def test_the_hooks_of_fsdp_call_as_many_functions_as_sys_setprofile_counts(
    dry_run, tmp_path, shards, counted
):
    """Of this network with PyTorch 2.14.1, its calls without FSDP left out."""
    step, _ = step_of(dry_run, tmp_path, shards + LOOP)
    assert step.host.hook_calls == pytest.approx(counted, rel=0.11)


def test_what_a_script_issues_itself_waits_where_the_script_does(dry_run, tmp_path):
    step, _ = step_of(dry_run, tmp_path, OWN)
    found = collectives(step)
    assert [each.name for _, each in found[:BLOCKS]] == ["nccl.all_reduce"] * BLOCKS
    assert [each.name for _, each in found[BLOCKS:]] in (["nccl.all_to_all"], ["nccl.send_recv"])
    names = [step.operations[number].name for number in step.order]
    last = len(names) - 1 - names[::-1].index("aten.erf.default")
    reduced = [place for place, _ in found[:BLOCKS]]
    waiting = [place for place, before in step.after if before in reduced]
    assert min(waiting) > last > max(reduced)  # and no earlier, when memfit has its tensors released


def test_a_collective_is_not_done_before_a_stream_waits_for_it(dry_run, tmp_path):
    """PyTorch 2.15 waits for none that is: DistributedDataParallel's update seemed to wait for nothing."""
    asked = """
        work = dist.all_reduce(model[0].weight.grad, async_op=True)
        (torch.erf if work.is_completed() else torch.sin)(model[0].weight)
        optimizer.step()
"""
    step, _ = step_of(dry_run, tmp_path, LOOP.replace("        optimizer.step()\n", asked.lstrip("\n")))
    names = {operation.name for operation in step.operations}
    assert {"aten.sin.default", "aten.erf.default"} & names == {"aten.sin.default"}
