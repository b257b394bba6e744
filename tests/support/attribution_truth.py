"""Run a script and record the memory of its live objects, as a ground truth that is independent of memfit.

    memfit dry-run --no-labels tests/support/attribution_truth.py TRUTH.json SCRIPT [ARGS...]

Saved-tensor hooks count the tensors saved for backward (memfit reads autograd's graph instead): those that
were allocated after the beginning of the forward that saved them, except a GradScaler's scale. Parameters
come from the garbage collector's list of objects, gradients and state from the optimizers that have stepped.
Copies of parameters are in modules, lists and dictionaries that have the shapes of all parameters of a model
that runs, in their order, and are none of them. What else Python holds from before the forward is an input.
Bytes are those of storages, each counted once. At the end come the optimizer steps and PyTorch's own peak.
memfit may run the script again under other assumptions (tokens routed evenly, GPU work that finishes late):
the file keeps the figures of the first run.

A script may name tensors that it keeps in lists of its own: ``copies`` of parameters, scales ``beside``
quantised parameters, and what it ``held`` besides. The largest workspace of a convolution is what its forward
took in addition to its result, and cuBLAS's workspaces are what their release frees.
"""

import functools
import gc
import itertools
import json
import runpy
import sys
import weakref
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

AVERAGED = ("AveragedModel", "ModelEma", "ModelEmaV2", "ModelEmaV3")


class Kept:
    """A tensor that autograd saved, alive as long as autograd keeps it."""

    def __init__(self, tensor: torch.Tensor, window: int) -> None:
        self.tensor = tensor.detach()
        self.window = window


class Truth:
    """The memory of a script's objects at each backward and optimizer step."""

    def __init__(self) -> None:
        self.found: dict[str, list[dict[str, int]]] = {"backward": [], "optimizer step": [], "end": []}
        self._workspaces: dict[str, int] = {}
        self._peak = 0  # before the peak was reset
        self._kept: weakref.WeakSet[Kept] = weakref.WeakSet()
        # Per window, from one backward to the next: length of the history at its first forward and its end.
        self._entered: list[int] = []
        self._ended: list[int] = []
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # outermost modules that ran
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
        clear = torch._C._cuda_clearCublasWorkspaces

        def release() -> None:
            before = torch.cuda.memory_allocated()
            clear()
            self._workspaces["cuBLAS workspaces"] = before - torch.cuda.memory_allocated()

        torch._C._cuda_clearCublasWorkspaces = release

    def pack(self, tensor: torch.Tensor) -> Kept:
        """Record a saved tensor."""
        kept = Kept(tensor, len(self._ended))
        self._kept.add(kept)
        return kept

    def _enter(self, module: torch.nn.Module, *_: object) -> None:
        if isinstance(module, torch.nn.Conv2d) and torch.backends.cudnn.benchmark:
            self._peak = max(self._peak, torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            self._before_convolution = torch.cuda.memory_allocated()
        if not self._depth and torch._C._current_graph_task_id() < 0:
            self._models.add(module)
            fresh = len(self._entered) == len(self._ended)
            if fresh and torch.cuda.is_initialized():
                self._entered.append(len(history()))
        self._depth += 1

    def _leave(self, module: torch.nn.Module, _arguments: object, result: Any) -> None:
        self._depth -= 1
        if isinstance(module, torch.nn.Conv2d) and torch.backends.cudnn.benchmark:
            rise = torch.cuda.max_memory_allocated() - self._before_convolution - result.nbytes
            name = "largest workspace of a convolution"
            self._workspaces[name] = max(rise, self._workspaces.get(name, 0))

    def _backward(self) -> None:
        events = history()
        if len(self._entered) == len(self._ended):
            self._entered.append(len(events))  # a backward without a forward before it
        self._ended.append(len(events))
        made = {event["addr"]: at for at, event in enumerate(events) if event["action"] == "alloc"}
        scalers = [one for one in gc.get_objects() if type(one) is torch.amp.GradScaler]
        scales = storages(getattr(one, "_scale", None) for one in scalers)  # a disabled scaler has none
        communicated = storages(gathered())
        parameters = storages(live_parameters()) | storages(shards()) | named("beside")
        parameters = without(parameters, communicated)
        sizes = {
            start: size
            for kept in list(self._kept)
            for start, size in storages([kept.tensor]).items()
            if self._entered[kept.window] <= made.get(start, -1) < self._ended[kept.window]
            and start not in scales
            and start not in parameters
            and start not in communicated
        }
        buffers = storages(one for module in live(torch.nn.Module) for one in module._buffers.values())
        owned = {*sizes, *scales, *parameters, *buffers, *self._gradient_sizes(), *self._state_sizes()}
        held = {
            start: size
            for start, size in storages(live(torch.Tensor)).items()
            if start not in owned and made.get(start, -1) < self._entered[-1]
        }
        averages = [one for one in live(torch.nn.Module) if type(one).__name__ in AVERAGED]
        mirrors = storages(copies_of_parameters(self._models)) | named("copies")
        mirrors |= storages(one for average in averages for one in average.parameters())
        mirrors = without(mirrors, storages(shards()))
        entry = {
            "saved": sizes,
            "parameters": without(parameters, mirrors),
            "buffers": buffers,
            "copies": {
                start: size for start, size in mirrors.items() if start in held or start in parameters
            },
            "inputs": without(held, mirrors),
        } | ({"held": named("held")} if named("held") else {})
        self.found["backward"].append({name: sum(each.values()) for name, each in entry.items()})

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
        steps, peak = len(self.found["optimizer step"]), max(self._peak, torch.cuda.max_memory_allocated())
        self.found["end"].append({"steps": steps, "peak": peak} | self._workspaces)


@functools.cache
def record_history() -> None:
    """Let PyTorch record the allocator's events from now on; what is older is older than any forward."""
    torch.cuda.memory._record_memory_history(context=None)


def history() -> list[dict[str, Any]]:
    """Return the allocator's events since the first call."""
    record_history()
    events: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][0]
    return events


def live(kind: type) -> list[Any]:
    """Return the objects of a class that the garbage collector knows; proxies of others are left out."""
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def live_parameters() -> Iterator[torch.Tensor]:
    """Yield the parameters that the garbage collector knows; those of modules may be of another class."""
    yield from live(torch.nn.Parameter)
    for module in live(torch.nn.Module):
        yield from (one for one in module._parameters.values() if one is not None)


def shards() -> Iterator[torch.Tensor]:
    """Yield this rank's shards of parameters that FSDP has gathered."""
    for one in gc.get_objects():
        if type(one).__name__ == "FSDPParam":
            yield one.sharded_param
        if type(one).__name__ == "FlatParameter":
            yield one._local_shard


def gathered() -> Iterator[torch.Tensor]:
    """Yield what FSDP gathers of parameters."""
    for one in gc.get_objects():
        if type(one).__name__ == "FSDPParam":
            yield from one.all_gather_outputs
        if type(one).__name__ == "FlatParameter" and one._full_param_padded.untyped_storage().nbytes():
            yield one._full_param_padded


def named(name: str) -> dict[int, int]:
    """Return the storages of the tensors that the script keeps in a list of this name."""
    return storages(vars(sys.modules["__main__"]).get(name, ()))


def copies_of_parameters(models: Collection[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the tensors of modules, lists and dictionaries that mirror all parameters of a model."""
    trained = [list(model.parameters()) for model in models]
    own = {id(one) for parameters in trained for one in parameters}
    shapes = {tuple(one.shape for one in parameters) for parameters in trained if parameters}
    contents = (list(one.values()) if type(one) is dict else one for one in live_containers())
    held = (each for each in contents if all(isinstance(one, torch.Tensor) for one in each))
    modules = (list(module.parameters()) for module in live(torch.nn.Module))
    for tensors in itertools.chain(held, modules):
        if tuple(one.shape for one in tensors) in shapes:
            yield from (one for one in tensors if id(one) not in own)


def live_containers() -> list[Any]:
    """Return the lists and dictionaries that the garbage collector knows."""
    return [one for one in gc.get_objects() if type(one) in {list, dict}]


def without(sizes: Mapping[int, int], others: Container[int]) -> dict[int, int]:
    """Return the entries whose address is not among others."""
    return {start: size for start, size in sizes.items() if start not in others}


def storages(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    """Return the bytes of CUDA tensors' storages by address; None counts as no tensor."""
    plain = (plain_tensor(one) for one in tensors if one is not None)
    on_gpu = (one.untyped_storage() for one in plain if one.is_cuda)
    return {storage.data_ptr(): storage.nbytes() for storage in on_gpu if storage.nbytes()}


def plain_tensor(tensor: Any) -> torch.Tensor:
    """Return the tensor inside a DTensor, or inside the result of a collective; any other tensor itself."""
    inside = {"DTensor": "_local_tensor", "AsyncCollectiveTensor": "elem"}.get(type(tensor).__name__)
    return plain_tensor(getattr(tensor, inside)) if inside else tensor


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
        if not Path(out).exists():
            Path(out).write_text(json.dumps(truth.found))


if __name__ == "__main__":
    main()
