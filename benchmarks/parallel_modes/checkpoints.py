"""Saving and loading sharded state with torch.distributed.checkpoint."""

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp2 import shard
from jobs import Model, start, train, variant
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful


class Application(Stateful):
    """A model and its optimizer, as PyTorch's tutorial saves them."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


def sharded(device):
    model = shard(Model().to(device))
    optimizer = train(model, device)
    dcp.save({"app": Application(model, optimizer)}, checkpoint_id="app")
    fresh = shard(Model().to(device))
    other = torch.optim.AdamW(fresh.parameters())
    dcp.load({"app": Application(fresh, other)}, checkpoint_id="app")
    train(fresh, device, other)


def full(device, offload=True):
    model = shard(Model().to(device))
    optimizer = train(model, device)
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    state = get_model_state_dict(model, options=options)
    get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save(state, "full.pt")
        torch.load("full.pt")
    set_model_state_dict(model, state, options=options)


full_on_gpu = partial(full, offload=False)


def asynchronous(device):
    model = shard(Model().to(device))
    optimizer = train(model, device)
    group = dist.new_group(backend="gloo")
    saved = dcp.async_save({"app": Application(model, optimizer)}, checkpoint_id="later", process_group=group)
    train(model, device, optimizer)
    saved.result()


def by_hand(device):
    from torch.distributed.tensor import DTensor

    model = shard(Model().to(device))
    train(model, device)
    state = {}
    for name, parameter in model.state_dict().items():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if dist.get_rank() == 0:
            state[name] = whole.cpu()
    if dist.get_rank() == 0:
        torch.save(state, "by_hand.pt")
    dist.barrier()


def planned_without_group(device):
    model = shard(Model().to(device))
    train(model, device)
    dcp.save(get_model_state_dict(model), checkpoint_id="plain")
    dcp.load(get_model_state_dict(model), checkpoint_id="plain")


def ddp(device):
    model = torch.nn.parallel.DistributedDataParallel(Model().to(device))
    optimizer = train(model, device)
    dcp.save({"app": Application(model, optimizer)}, checkpoint_id="ddp")
    dcp.load({"app": Application(model, optimizer)}, checkpoint_id="ddp")


if __name__ == "__main__":
    chosen = variant(globals())
    chosen(start("cpu:gloo,cuda:nccl" if chosen is asynchronous else "nccl"))
