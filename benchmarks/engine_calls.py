"""Count the function calls, source files and file switches of one window of ``Engine.fit``.

    python benchmarks/engine_calls.py [--show] [--allowed 90]

The window is in fp16 with two micro-batches, on two ranks (Gloo, on the CPU). From the end of one window to
the end of the next, after a warm-up, the script counts calls of memfit's functions, the files of these
functions, and file switches: consecutive calls of functions in different files. A reader who follows a window
through the source turns to another file as often. ``--show`` prints the calls. Exits with 1 if there are more
switches than ``--allowed``.
"""

import argparse
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memfit

_SOURCE = str(Path(memfit.__file__).parent)
_WARM_UP = 3
"""Windows before the one that is counted: the first ones copy all buffers and protect the update."""


class CountCalls(memfit.Callback):
    """Records the memfit functions that are called in one window, as (file, function)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._windows = 0

    def on_window_end(self, engine: Any, result: memfit.StepResult) -> None:  # noqa: ARG002
        """Begin to count after the warm-up, and end one window later."""
        sys.setprofile(None)
        self._windows += 1
        if self._windows == _WARM_UP:
            sys.setprofile(self._record)

    def _record(self, frame: Any, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(_SOURCE):
            self.calls.append((path.removeprefix(_SOURCE + "/"), frame.f_code.co_qualname))


def train(rank: int, store: str, found: Any) -> None:
    """Train on one of two ranks, and put the calls of rank 0 into a queue."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    count = CountCalls()
    engine = memfit.Engine(
        model,
        [memfit.Sharding("ddp"), memfit.Precision("fp16"), memfit.Accumulation(parts_per_batch=2)],
        optimizer=torch.optim.AdamW,
        loss=lambda model, batch: model(batch).float().square().mean(),
        callbacks=[count],
    )
    engine.fit([torch.randn(8, 16) for _ in range(_WARM_UP + 2)])
    if rank == 0:
        found.put(count.calls)
    torch.distributed.destroy_process_group()


def main() -> None:
    """Train on two ranks, and print what one window called."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--show", action="store_true", help="print each call")
    parser.add_argument("--allowed", type=int, help="file switches")
    options = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (f"{folder}/store", found), nprocs=2)  # type: ignore[no-untyped-call]
    calls = found.get()
    files = [path for path, _ in calls]
    switches = sum(one != other for one, other in itertools.pairwise(files))
    if options.show:
        for path, function in calls:
            print(f"{path:45} {function}")
    print(f"{len(calls)} calls, {len(set(files))} files, {switches} file switches")
    if options.allowed is not None and switches > options.allowed:
        raise SystemExit(f"{switches} file switches are more than {options.allowed}.")


if __name__ == "__main__":
    main()
