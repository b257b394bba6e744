"""PyTorch's own planner of selective checkpointing, ``torch.distributed._tools.sac_ilp``, as a peer.

    python -m pip install pulp pwlf

It gets the measured seconds of each operation, as memfit's planner does, instead of its roofline of a GPU.
``memfit.Checkpointing`` carries out what it chooses: for each module the operations that its policy saves.
"""

import contextlib
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from planned_networks import Network
from torch._subclasses.fake_tensor import FakeTensorMode

import memfit
from memfit.records import StepOperations


class SacIlp:
    """PyTorch's planner for one network.

    Args:
        make: the network's function, called again for fake tensors.
        step: a recorded step, with measured seconds.

    Raises:
        ImportError: pulp or pwlf is not installed.
    """

    def __init__(self, make: Callable[[], Network], step: StepOperations) -> None:
        from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
        from torch.distributed._tools.mem_tracker import MemTracker
        from torch.distributed._tools.runtime_estimator import RuntimeEstimator
        from torch.distributed._tools.sac_estimator import SACEstimator

        with FakeTensorMode(), contextlib.redirect_stdout(io.StringIO()):
            network = make()
            gradients, *_ = network.model.parameters()
            memory, runtime, self._estimator = MemTracker(), RuntimeEstimator(), SACEstimator()
            _run(network)  # gradients exist from now on, as in the step that is measured
            memory.track_external(network.model)
            with memory:
                _run(network)
            runtime._estimate, runtime._estimate_mode_type = _Measured(step), "measured"
            with runtime:
                _run(network)
            self._estimator._estimate_runtime = _Measured(step)
            with self._estimator:
                network.loss(network.model, network.inputs, network.targets)
            for order in (runtime.mod_fw_pre_order, runtime.mod_fw_post_order):
                order[:] = dict.fromkeys(order)  # it cannot read modules that are called twice
            info = aggregate_stats(
                network.model, memory, runtime, self._estimator, torch.device(gradients.device)
            )
        self._graph = parse_module_info(info)

    def choose(self, budget: float) -> memfit.Checkpointing | None:
        """Return what it chooses for a budget in GiB, parameters and gradients included; None if nothing."""
        from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

        discarded, _, peak = sac_milp(self._graph, budget)
        if peak < 0 or not discarded:
            return None
        root = self._graph.nodes[0]["fqn"]
        regions = []
        for module, share in discarded.items():
            saved = get_optimal_checkpointing_policy_per_module(
                self._estimator.sac_mod_stats[module], 1 - share
            )
            if not saved:
                return None  # its solver found no policy
            names = tuple(self._saved(module, saved))
            regions.append(memfit.Region(module.removeprefix(root).removeprefix("."), save_ops=names))
        return memfit.Checkpointing(regions=tuple(regions))

    def _saved(self, module: str, saved: list[int]) -> Iterator[str]:
        """Yield the names of a module's operations whose policy is 1."""
        from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP
        from torch.utils.checkpoint import SAC_IGNORED_OPS

        seen: Counter[str] = Counter()
        decisions = iter(saved)
        for each in self._estimator._sac_mod_metadata[module].sac_metadata:
            if each.func in SAC_IGNORED_OPS:
                continue
            name = str(each.func)
            if each.func not in OPS_TO_ALWAYS_SKIP and next(decisions):
                yield f"{name}:{seen[name]}"
            seen[name] += 1


class _Measured:
    """Runs an operation, and returns the milliseconds that it took in the recorded step."""

    def __init__(self, step: StepOperations) -> None:
        self._taken: dict[str, list[float]] = defaultdict(list)
        for operation in (*step.forward, *step.backward):
            self._taken[operation.name].append(operation.seconds)
        self._seen: Counter[str] = Counter()

    def __call__(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        name = str(func)
        taken = self._taken.get(name, ())
        number = self._seen[name]
        self._seen[name] += 1
        return func(*args, **(kwargs or {})), 1e3 * taken[number] if number < len(taken) else 0.0


def _run(network: Network) -> None:
    network.loss(network.model, network.inputs, network.targets).backward()
