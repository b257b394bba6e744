"""Measure what watching a run costs per step, compared with no watch and with PyTorch's own history.

    python benchmarks/watch_overhead.py [--rounds 100] [--gpu A100-80GB]

The ghost computes nothing: a step takes only the time of Python and PyTorch to launch its kernels, so the
full overhead is visible. A busy GPU hides it. Each figure is the median over rounds of a step's processor
time minus that of the unwatched steps just before and after it.
"""

import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from pathlib import Path

from measuring import command_line, load_ghost

_STEPS = 4


@contextmanager
def history() -> Iterator[None]:
    """Have PyTorch record its allocations with their source lines, as labels require."""
    import torch

    record = torch.cuda.memory._record_memory_history
    record("all", context="alloc", stacks="python", max_entries=100_000)
    yield
    record(None, clear_history=True)


def step_of(make: Callable[[], tuple]) -> Callable[[], None]:
    """Return a training step of a model of ``engine_overhead.py``, on the GPU."""
    import torch
    from engine_overhead import loss_of

    model, batch = make()
    model, batch = model.cuda(), batch.cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None]) -> float:
    """Return the processor seconds of a step: the mean of a few, after one uncounted step."""
    step()
    start = time.process_time()
    for _ in range(_STEPS):
        step()
    return (time.process_time() - start) / _STEPS


def compare(
    name: str, step: Callable[[], None], ways: dict[str, Callable[[], AbstractContextManager]], rounds: int
) -> None:
    """Print what each way of watching adds to a step."""
    alone, more = [timed(step)], {way: [] for way in ways}
    gc.disable()
    for _ in range(rounds):
        gc.collect()
        for way, watched in random.sample(list(ways.items()), len(ways)):
            with watched():
                seconds = timed(step)
            alone.append(timed(step))
            more[way].append(seconds - (alone[-1] + alone[-2]) / 2)
    base = statistics.median(alone)
    print(f"{name:8} {base * 1e3:7.2f} ms per step")
    for way, seconds in more.items():
        median = statistics.median(seconds)
        print(f"  {way:34} {median * 1e6:+8.0f} µs {median / base:+7.1%}")


def main() -> None:
    """Load the ghost in place of a GPU and measure."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--gpu", default="A100-80GB")
    parameters = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    load_ghost(parameters.gpu, context=True)
    from engine_overhead import medium, small

    import memfit
    from memfit.records import MachineKind, Provenance, Stage
    from memfit.watching.prediction import PredictedStage, PredictedStep, Prediction, StepMemory
    from memfit.watching.watch import Watch

    step = PredictedStep(StepMemory(1, 1), 1)
    stages = (PredictedStage(Stage.TRAINING, 1, 1, (step,)),)
    prediction = Prediction((step,), stages, Provenance.EXACT, MachineKind.GHOST, "")
    ways = {
        "watch()": memfit.watch,
        "watch(trace of a whole run)": lambda: Watch(prediction, None, Path(), labels=False, files=3),
        "PyTorch's own history": history,
        "watch(labels=True)": lambda: memfit.watch(labels=True),
    }
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        for make in (small, medium):
            compare(make.__name__, step_of(make), ways, parameters.rounds)


if __name__ == "__main__":
    main()
