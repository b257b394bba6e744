"""Run a script and record the memory of its live objects, as a ground truth that is independent of memfit.

    memfit dry-run --no-labels benchmarks/attribution_truth.py TRUTH.json SCRIPT [ARGS...]

Saved-tensor hooks count the tensors saved for backward (memfit reads autograd's graph instead): those that
were allocated after the beginning of the forward that saved them, except a GradScaler's scale. Parameters
come from the garbage collector's list of objects, gradients and state from the optimizers that have stepped.
What else Python holds from before the forward is a copy of parameters, if a list or dictionary of it has
their shapes in their order, or an input. Bytes are those of storages, each counted once. At the end come the
optimizer steps and PyTorch's own peak.
"""

import gc
import json
import runpy
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Kept:
    """A tensor that autograd saved, alive as long as autograd keeps it."""

    def __init__(self, tensor: torch.Tensor, window: int) -> None:
        self.tensor = tensor.detach()
        self.window = window


class Truth:
    """The memory of a script's objects at each backward and optimizer step."""

    def __init__(self) -> None:
        self.found: dict[str, list[dict[str, int]]] = {"backward": [], "optimizer step": [], "end": []}
        self._kept: weakref.WeakSet[Kept] = weakref.WeakSet()
        # Per window, from one backward to the next: length of the history at its first forward and its end.
        self._entered: list[int] = []
        self._ended: list[int] = []
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._depth = 0

    def install(self) -> None:
        """Install hooks on modules, backwards and optimizers."""
        module, graph = torch.nn.modules.module, torch.autograd.graph
        module.register_module_forward_pre_hook(self._enter)
        module.register_module_forward_hook(self._leave, always_call=True)
        register_optimizer_step_pre_hook(self._begin_step)
        register_optimizer_step_post_hook(self._end_step)
        run = graph._engine_run_backward

        def backward(*args: object, **kwargs: object) -> object:
            if torch._C._current_graph_task_id() < 0:
                self._backward()
            return run(*args, **kwargs)

        graph._engine_run_backward = torch.autograd._engine_run_backward = backward

    def pack(self, tensor: torch.Tensor) -> Kept:
        """Record a saved tensor."""
        kept = Kept(tensor, len(self._ended))
        self._kept.add(kept)
        return kept

    def _enter(self, *_: object) -> None:
        fresh = len(self._entered) == len(self._ended)
        if (
            not self._depth
            and fresh
            and torch.cuda.is_initialized()
            and torch._C._current_graph_task_id() < 0
        ):
            self._entered.append(len(history()))
        self._depth += 1

    def _leave(self, *_: object) -> None:
        self._depth -= 1

    def _backward(self) -> None:
        events = history()
        if len(self._entered) == len(self._ended):
            self._entered.append(len(events))  # a backward without a forward before it
        self._ended.append(len(events))
        made = {event["addr"]: at for at, event in enumerate(events) if event["action"] == "alloc"}
        scalers = [one for one in gc.get_objects() if type(one) is torch.amp.GradScaler]
        scales = storages(one._scale for one in scalers if one._scale is not None)
        sizes = {
            start: size
            for kept in list(self._kept)
            for start, size in storages([kept.tensor]).items()
            if self._entered[kept.window] <= made.get(start, -1) < self._ended[kept.window]
            and start not in scales
        }
        parameters = storages(live(torch.nn.Parameter))
        buffers = storages(one for module in live(torch.nn.Module) for one in module._buffers.values())
        owned = {*sizes, *scales, *parameters, *buffers, *self._gradient_sizes(), *self._state_sizes()}
        held = {
            start: size
            for start, size in storages(live(torch.Tensor)).items()
            if start not in owned and made.get(start, -1) < self._entered[-1]
        }
        copies = {start: held[start] for start in storages(copies_of_parameters()) if start in held}
        entry = {"saved": sizes, "parameters": parameters, "buffers": buffers, "copies": copies}
        found = {name: sum(each.values()) for name, each in entry.items()}
        self.found["backward"].append(found | {"inputs": sum(held.values()) - found["copies"]})

    def _begin_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._optimizers.add(optimizer)
        self.found["optimizer step"].append({})

    def _end_step(self, *_: object) -> None:
        """Gradients are read after the step: a closure computes them inside it."""
        sizes = {"gradients": self._gradient_sizes(), "optimizer state": self._state_sizes()}
        self.found["optimizer step"][-1].update({name: sum(each.values()) for name, each in sizes.items()})

    def _gradient_sizes(self) -> dict[int, int]:
        groups = [group for each in self._optimizers for group in each.param_groups]
        gradients = [one.grad for group in groups for one in group["params"]]
        return storages(gradients)

    def _state_sizes(self) -> dict[int, int]:
        states = [state for each in self._optimizers for state in each.state.values()]
        return storages(
            value for state in states for value in state.values() if isinstance(value, torch.Tensor)
        )

    def end(self) -> None:
        """Record PyTorch's peak and the number of optimizer steps."""
        steps = len(self.found["optimizer step"])
        self.found["end"].append({"steps": steps, "peak": torch.cuda.max_memory_allocated()})


def history() -> list[dict[str, Any]]:
    """Return the allocator's events so far; memfit has enabled the history."""
    events: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][0]
    return events


def live(kind: type) -> list[Any]:
    """Return the objects of a class that the garbage collector knows; proxies of others are left out."""
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def copies_of_parameters() -> Iterable[torch.Tensor]:
    """Yield the tensors of lists and dictionaries that mirror the parameters of an outermost module."""
    modules = live(torch.nn.Module)
    inner = {id(child) for module in modules for child in module.children()}
    shapes = {
        tuple(one.shape for one in module.parameters()) for module in modules if id(module) not in inner
    } - {()}
    for holder in gc.get_objects():
        values = list(holder.values()) if type(holder) is dict else holder
        if type(values) is not list or not all(isinstance(one, torch.Tensor) for one in values):
            continue
        if tuple(one.shape for one in values) in shapes:
            yield from values


def storages(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    """Return the bytes of CUDA tensors' storages by address; None counts as no tensor."""
    on_gpu = (one.untyped_storage() for one in tensors if one is not None and one.is_cuda)
    return {storage.data_ptr(): storage.nbytes() for storage in on_gpu if storage.nbytes()}


def main() -> None:
    """Run the script under the hooks and write the recorded figures."""
    out, script = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).parent)
    truth = Truth()
    truth.install()
    try:
        with torch.autograd.graph.saved_tensors_hooks(truth.pack, lambda kept: kept.tensor):
            runpy.run_path(script, run_name="__main__")
    finally:
        truth.end()
        Path(out).write_text(json.dumps(truth.found))


if __name__ == "__main__":
    main()
