"""Kill a run that saves every step at random moments, and check that it resumes bit for bit.

    python tests/support/killed_run.py KILLS

A run trains a small network with dropout on a shuffled loader, in fp16 with loss scaling and two
micro-batches per update, and saves after each update. The benchmark kills (SIGKILL) and restarts the run
repeatedly, and compares its result with that of an uninterrupted run. It forks the processes, so that they
start at once and a kill may hit any phase: loading the file, a forward, a write.
"""

import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import memfit
from memfit.train.resume.state_file import load_state_file

EPOCHS, SAMPLES = 8, 160


def train(folder: Path) -> None:
    """Train from the saved state if there is one; write a digest of the parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3))
    data = torch.randn(SAMPLES, 8)
    engine = memfit.Engine(
        model,
        [memfit.Precision("fp16"), memfit.Accumulation(parts_per_batch=2)],
        optimizer=torch.optim.AdamW(model.parameters()),
        loss=lambda model, batch: model(batch).float().square().mean(),
        callbacks=[memfit.Saving(folder / "run")],
    )
    if (folder / "run").exists():
        engine.load(folder / "run")
    engine.fit(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True), epochs=EPOCHS)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    (folder / "digest").write_text(f"{engine.optimizer_step} {digest.hexdigest()}")


def warm() -> None:
    """Import PyTorch's lazy modules before forking; no backward here, because it would start threads."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()


def start(folder: Path) -> int:
    """Train in a forked child; return its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(folder)
            code = 0
        finally:
            os._exit(code)
    return child


def ended(child: int) -> bool:
    """Wait for a child; return whether it finished training."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def written(folder: Path) -> int | None:
    """When the run saved its state last, in nanoseconds; None before its first save."""
    state = folder / "run"
    return state.stat().st_mtime_ns if state.exists() else None


def wait_for_save(child: int, folder: Path) -> None:
    """Wait until the child saves its state or ends."""
    before = written(folder)
    while written(folder) == before and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.0005)


def kill(folder: Path, kills: int, chance: random.Random, longest: float) -> tuple[int, set[int]]:
    """Start and kill ``kills`` runs; return how many finished first, and the steps of the saved states.

    Every second kill is timed from the run's next save and not from its start, so that some follow a save
    on a machine of any speed.
    """
    finished, steps = 0, set()
    while kills:
        child = start(folder)
        if kills % 2:
            wait_for_save(child, folder)
        time.sleep(chance.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        if ended(child):
            finished += 1
            check(folder)
            (folder / "run").unlink()
            continue
        kills -= 1
        if (folder / "run").exists():
            steps.add(load_state_file(folder / "run")["optimizer_step"])
    return finished, steps


def check(folder: Path) -> None:
    """Compare a run's result with that of the uninterrupted run; exit if they differ."""
    whole = (folder.parent / "whole" / "digest").read_text()
    found = (folder / "digest").read_text()
    if found != whole:
        raise SystemExit(f"different result: {found}; the uninterrupted run gave {whole}")


def main() -> None:
    """Kill runs and compare the results."""
    kills = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        whole.mkdir()
        killed.mkdir()
        warm()
        began = time.monotonic()
        if not ended(start(whole)):
            sys.exit("the uninterrupted run failed")
        taken = time.monotonic() - began
        finished, steps = kill(killed, kills, random.Random(0), taken / 4)  # noqa: S311
        if not ended(start(killed)):
            sys.exit("a run could not resume")
        check(killed)
        if not steps:
            sys.exit("Every run finished or was killed before its first save: nothing was tested.")
        left = sum(1 for path in killed.iterdir() if path.name not in ("run", "digest"))
    print(
        f"{kills} kills, saved states of {len(steps)} different steps between {min(steps)} and "
        f"{max(steps)}; {finished + 1} finished runs, all identical to the uninterrupted one bit for bit; "
        f"{left} unfinished files left"
    )


if __name__ == "__main__":
    main()
