"""Train a job of the user's by an engine, as commands do for a target such as ``job.py:make_job``.

    memfit plan --budget 8GiB job.py:make_job --batch-size 64

``--parts-per-batch`` is how a plan has the engine divide batches.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.train.engine import Engine
from memfit.train.training_job import Job

_EXAMPLE = "memfit.Job(model, optimizer, loss, batch=lambda size: torch.randn(size, 512))"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the job that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job", help="FILE.py:FUNCTION, which returns a memfit.Job")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--parts-per-batch", type=int, default=1, help="micro-batches of a batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    sys.argv[1:] = []  # a script that the job imports may read arguments: these are not its own

    torch.manual_seed(0)
    try:
        job, batch = _load_job(options.job)
    except UsageError as error:
        raise SystemExit(str(error)) from None
    job.model.to(options.device)
    # As without memfit, the job ends where memory runs out: a retry in smaller parts is another run.
    engine = Engine(job, Accumulation(parts_per_batch=options.parts_per_batch), retry=False)
    for _ in range(options.steps):
        samples = batch(options.batch_size)
        engine.step(tree_map_only(torch.Tensor, lambda tensor: tensor.to(options.device), samples))


def _load_job(target: str) -> tuple[Job, Callable[[int], Any]]:
    """Return the job that a function in a file makes, and what makes its batches.

    >>> _load_job("nowhere.py:make_job")
    Traceback (most recent call last):
    memfit.errors.UsageError: There is no file nowhere.py. Write the path of one: FILE.py:FUNCTION.
    """
    name, _, function = target.rpartition(":")
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"There is no file {name}. Write the path of one: FILE.py:FUNCTION.")
    make = getattr(_imported(path), function, None)
    if not callable(make):
        raise UsageError(f"{name} has no function {function}. Define one that returns a job: {_EXAMPLE}.")
    job = make()
    if not isinstance(job, Job):
        raise UsageError(
            f"{function}() in {name} returned {type(job).__name__}. Have it return a job: {_EXAMPLE}."
        )
    if job.batch is None:
        raise UsageError(f"The job of {function}() in {name} makes no batches. Add batch: {_EXAMPLE}.")
    return job, job.batch


def _imported(path: Path) -> Any:
    """Import a file as a script would be: modules beside it can be imported."""
    sys.path.insert(0, str(path.resolve().parent))
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file.")
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
