"""Count what the host does, and find from the seconds of many runs how long it takes for one of each thing.

Each network runs in several ways: without gradients, with a backward, with an update, in checkpointed
regions, and in regions that a dispatch mode watches. What each does, and its processor time, make equations:

    counts x seconds of one = seconds        relative errors: least squares
    seconds of one = assumed x machine       a weaker belief: where the networks do not tell two things
                                             apart, their assumed ratio decides
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memfit.recording.operation_interception import OperationInterceptionMode
from memfit.recording.python_call_counter import PythonCallCounter
from memfit.records import ASSUMED_HOST_TIMES, MEASURED_OF_HOST, HostUnits

_BELIEF = 0.6
_COLDER = 1.05
"""As much longer as here do networks of libraries take, whose steps repeat less: benchmarks/host_times.py."""
_WIDTH, _DEPTH = 48, 6


@dataclass(frozen=True)
class CountedRun:
    """Something that runs, and what it does."""

    counts: HostUnits
    run: Callable[[], Any]


def count_host_work(run: Callable[[], Any]) -> tuple[HostUnits, int]:
    """Return the calls, operations and nodes of a function, and its operations with views, on the GPU.

    Args:
        run: has run before, and is run twice.
    """
    is_view: list[bool] = []

    def note(operation: Any, args: Any, kwargs: Any) -> Any:
        result = operation(*args, **kwargs)
        if any(
            isinstance(each, torch.Tensor) and each.is_cuda for each in tree_leaves((args, kwargs, result))
        ):
            is_view.append(operation.is_view)
        return result

    calls, before = PythonCallCounter(), torch._C._autograd._get_sequence_nr()
    calls.start()
    run()
    calls.stop()
    nodes = torch._C._autograd._get_sequence_nr() - before
    with OperationInterceptionMode(note):
        run()
    operations = len(is_view) - sum(is_view)
    return HostUnits(python_calls=calls.calls, operations=operations, autograd_nodes=nodes), len(is_view)


def count_saved_tensors(run: Callable[[], Any]) -> int:
    """Return how many tensors autograd saves in a function."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda kept: kept):
        run()
    return len(saved)


def small_networks() -> Iterator[tuple[nn.Sequential, Callable[[], torch.Tensor]]]:
    """Yield networks of blocks of various styles, on the GPU, and what computes the loss of each."""

    def transformer() -> nn.Module:
        return nn.TransformerEncoderLayer(_WIDTH, 4, 2 * _WIDTH, batch_first=True)

    def convolution() -> nn.Module:
        return nn.Sequential(nn.Conv2d(_WIDTH, _WIDTH, 3), nn.BatchNorm2d(_WIDTH), nn.ReLU())

    def perceptron() -> nn.Module:
        return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Dropout(0.1))

    for block, shape in (
        (transformer, (2, 16, _WIDTH)),
        (convolution, (1, _WIDTH, 64, 64)),
        (perceptron, (2, 16, _WIDTH)),
    ):
        network = nn.Sequential(*(nn.Sequential(block(), block()) for _ in range(_DEPTH))).cuda()
        inputs = torch.ones(shape, device="cuda", requires_grad=True)
        yield network, lambda network=network, inputs=inputs: network(inputs).sum()  # type: ignore[misc]


def ways_to_run(
    model: nn.Module, loss: Callable[[], torch.Tensor], blocks: Sequence[nn.Module]
) -> dict[str, CountedRun]:
    """Return the ways to run a model on the GPU, by name, with the counts of each."""
    optimizer = torch.optim.AdamW(model.parameters())

    def evaluate() -> None:
        with torch.no_grad():
            loss()

    def train() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(loss())

    def update() -> None:
        train()
        optimizer.step()

    run_blocks = _calls_again(blocks, update)
    parameters = len(list(model.parameters()))
    again, dispatched = count_host_work(run_blocks)
    plain = replace(count_host_work(train)[0], gradients=parameters)
    operations = count_host_work(update)[0].operations
    regions = replace(
        plain,
        python_calls=plain.python_calls + again.python_calls,
        operations=plain.operations + again.operations,
        autograd_nodes=plain.autograd_nodes + again.autograd_nodes,
        checkpointed_regions=len(blocks),
        checkpointed_tensors=count_saved_tensors(run_blocks),
    )
    contexts = partial(create_selective_checkpoint_contexts, _recompute)
    return {
        "evaluated": CountedRun(count_host_work(evaluate)[0], evaluate),
        "trained": CountedRun(plain, train),
        "updated": CountedRun(replace(plain, operations=operations, updated_parameters=parameters), update),
        "checkpointed": CountedRun(regions, partial(_run_in_regions, blocks, train)),
        "selective": CountedRun(
            replace(regions, watched_operations=2 * dispatched),
            partial(_run_in_regions, blocks, train, context_fn=contexts),
        ),
    }


def _calls_again(blocks: Sequence[nn.Module], run: Callable[[], Any]) -> Callable[[], None]:
    """Return what calls blocks again as they are called when something runs, which it does."""
    passed: dict[nn.Module, tuple[Any, Any]] = {}

    def note(block: nn.Module, args: Any, kwargs: Any) -> None:
        passed[block] = args, kwargs

    def call_again() -> None:
        for block, (args, kwargs) in passed.items():
            block(*args, **kwargs)

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    run()
    for hook in hooks:
        hook.remove()
    return call_again


def _run_in_regions(blocks: Sequence[nn.Module], run: Callable[[], Any], **options: Any) -> None:
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    run()
    for block in blocks:
        del block.forward


def _recompute(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def least_processor_times(runs: Sequence[Callable[[], Any]], most: float, rounds: int) -> list[float]:
    """Return the least processor time of each, of rounds in turn: other processes disturb some rounds.

    Args:
        runs: what to measure.
        most: seconds after which no further round begins.
        rounds: as many rounds are enough.
    """
    for run in runs:
        run()
    least = [float("inf")] * len(runs)
    gc.collect()
    gc.disable()
    began = time.monotonic()
    for _ in range(rounds):
        for number, run in enumerate(runs):
            before = time.process_time()
            run()
            least[number] = min(least[number], time.process_time() - before)
        if time.monotonic() - began > most:
            break
    gc.enable()
    return least


def seconds_of_one(counts: Sequence[HostUnits], seconds: Sequence[float]) -> HostUnits:
    """Return the seconds of one of each thing that explain the seconds of what was counted.

    >>> counts = [HostUnits(python_calls=3000, operations=100), HostUnits(python_calls=100, operations=300)]
    >>> slow = [2 * ASSUMED_HOST_TIMES.step_seconds(each) for each in counts]
    >>> f"{seconds_of_one(counts, slow).operations:.1e}"
    '1.7e-05'
    """
    assumed = _matrix([ASSUMED_HOST_TIMES.one])
    relative = _matrix(counts) * assumed / torch.tensor(seconds, dtype=torch.float64)[:, None]
    machine = 1 / statistics.median(relative.sum(1).tolist())
    believed = _BELIEF * torch.eye(len(MEASURED_OF_HOST), dtype=torch.float64)
    left = torch.cat([relative, believed / machine])
    right = torch.cat([torch.ones(len(counts), dtype=torch.float64), believed.sum(1)])
    found = (torch.linalg.lstsq(left, right).solution * assumed[0]).clamp(min=0).tolist()
    one = {name: _COLDER * each for name, each in zip(MEASURED_OF_HOST, found, strict=True)}
    other = ASSUMED_HOST_TIMES.one
    replayed = one["checkpointed_tensors"] * other.replayed_tensors / other.checkpointed_tensors
    return replace(other, **one, hook_calls=one["python_calls"], replayed_tensors=replayed)


def seconds_of_cpu_gigabyte() -> float:
    """Return the seconds in which additions on the CPU read and write 10^9 bytes: the least of ten times."""
    one, other = (torch.ones(1 << 24) for _ in range(2))
    took = []
    for _ in range(10):
        began = time.perf_counter()
        one.add_(other)
        took.append(time.perf_counter() - began)
    return min(took) * 1e9 / (3 * one.nbytes)


def _matrix(units: Sequence[HostUnits]) -> torch.Tensor:
    """Return (each of ``units``, each of ``MEASURED_OF_HOST``)."""
    rows = [[getattr(each, name) for name in MEASURED_OF_HOST] for each in units]
    return torch.tensor(rows, dtype=torch.float64)
