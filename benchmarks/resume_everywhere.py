"""Stop a run after every micro-step, resume it, and compare the result with an uninterrupted run.

    python benchmarks/resume_everywhere.py [--batches 102] [--steps 4]

A small network with dropout trains with AdamW and gradient accumulation for one epoch, whose last window is
partial. For each number of micro-steps, from none to all, the benchmark saves a run there, loads it into a
new engine with other parameters and another seed, and trains to the end. Parameters and buffers must equal
those of the uninterrupted run bit for bit.

Prints the number of equal runs; exits with 1 if one differs. tests/train/test_engine.py stops only at window
boundaries.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measuring import command_line
from torch import nn
from torch.nn import functional as F  # noqa: N812

import memfit


def new_engine(seed: int, steps: int) -> memfit.Engine:
    """Return an engine for a small network with dropout."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return memfit.Engine(model, memfit.Accumulation(batches_per_update=steps), optimizer=optimizer)


def train(engine: memfit.Engine, batches: list[Any], until: int | None = None) -> memfit.Engine:
    """Train for the rest of the epoch, or until a number of micro-steps is done."""
    for window in engine.windows(batches):
        for inputs, targets in window:
            with engine.autocast():
                loss = F.cross_entropy(engine.model(inputs), targets)
            engine.backward(loss)
            if engine.micro_step == until:
                return engine
    return engine


def resumes_equal(stop: int, batches: list[Any], steps: int, expected: dict[str, Any], path: Path) -> bool:
    """Return whether a run saved after ``stop`` micro-steps ends like the uninterrupted one."""
    first = new_engine(0, steps)
    if stop:
        train(first, batches, until=stop)
    first.save(path)
    torch.manual_seed(99)
    second = new_engine(5, steps)
    second.load(path)
    found = train(second, batches).model.state_dict()
    return all(torch.equal(found[name], value) for name, value in expected.items())


def main() -> int:
    """Stop and resume after every micro-step; return the exit code."""
    parser = command_line(__doc__)
    parser.add_argument("--batches", type=int, default=102)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(6, 5, generator=generator), torch.randint(3, (6,), generator=generator))
        for _ in range(options.batches)
    ]
    expected = train(new_engine(0, options.steps), batches).model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        different = [
            stop
            for stop in range(options.batches + 1)
            if not resumes_equal(stop, batches, options.steps, expected, path)
        ]
    equal = options.batches + 1 - len(different)
    print(f"{equal} of {options.batches + 1} resumed runs are equal bit for bit")
    if different:
        print(f"different after micro-steps {different}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
