"""Run a script and record the memory of its live objects, as a ground truth that is independent of memfit.

    memfit dry-run --no-labels benchmarks/attribution_truth.py TRUTH.json SCRIPT [ARGS...]

Saved-tensor hooks count the tensors saved for backward (memfit reads autograd's graph instead): those that
were allocated after the beginning of the forward that saved them, except a GradScaler's scale. Parameters
come from the garbage collector's list of objects, gradients and state from the optimizers that have stepped.
Bytes are those of storages, each counted once.
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
        self.found: dict[str, list[dict[str, int]]] = {"backward": [], "optimizer step": []}
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
        register_optimizer_step_pre_hook(self._gradients)
        register_optimizer_step_post_hook(self._state)
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
        if not self._depth and fresh and torch._C._current_graph_task_id() < 0:
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
        parameters = storages(one for one in gc.get_objects() if type(one) is torch.nn.Parameter)
        entry = {"saved": sum(sizes.values()), "parameters": sum(parameters.values())}
        self.found["backward"].append(entry)

    def _gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._optimizers.add(optimizer)
        groups = [group for each in self._optimizers for group in each.param_groups]
        gradients = [one.grad for group in groups for one in group["params"]]
        sizes = storages(one for one in gradients if one is not None)
        self.found["optimizer step"].append({"gradients": sum(sizes.values())})

    def _state(self, *_: object) -> None:
        states = [state for each in self._optimizers for state in each.state.values()]
        values = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        self.found["optimizer step"][-1]["optimizer state"] = sum(storages(values).values())


def history() -> list[dict[str, Any]]:
    """Return the allocator's events so far; memfit has enabled the history."""
    events: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][0]
    return events


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of CUDA tensors' storages by address."""
    on_gpu = (tensor.untyped_storage() for tensor in tensors if tensor.is_cuda)
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
        Path(out).write_text(json.dumps(truth.found))


if __name__ == "__main__":
    main()
