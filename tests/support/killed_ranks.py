"""Kill a rank (SIGKILL) at a random moment of a step or a save, and see how the job goes on.

Each job trains a small network with batch norm and dropout on a shuffled DistributedSampler, in fp16 with
loss scaling and two parts per batch, and saves after each update. A random rank is killed, half of the times
soon after a save. The other ranks must end within 20 seconds with an error that names the killed one. The
job, started again, continues from its last save. When it has finished, parameters, optimizer state, buffers
and the next random numbers of each rank must equal those of an uninterrupted job bit for bit.

A rank may also be killed while the ranks still start: the others then wait for it, and the benchmark ends
them, as torchrun does.
"""

import hashlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import memfit
from memfit.errors import RankFailedError
from memfit.train.resume.state_file import load_state_file
from support.rank_rows import Row

KILLS = 8
"""Of each job."""
SECONDS = 20
EPOCHS, SAMPLES = 3, 128
_FINISHED, _REPORTED = 0, 3


def rows(kills: int = KILLS, jobs: tuple[tuple[str, int], ...] = ()) -> Iterator[Row]:
    """Kill ranks of each kind of job; of these kinds (mode, ranks) only, if given."""
    _warm()
    for mode, ranks in jobs or [(mode, ranks) for mode in ("ddp", "zero1", "fsdp2") for ranks in (2, 4)]:
        with tempfile.TemporaryDirectory() as name:
            yield _row(mode, ranks, kills, Path(name))


def _row(mode: str, ranks: int, kills: int, folder: Path) -> Row:
    whole, killed = folder / "whole", folder / "killed"
    began = time.monotonic()
    if _wait(_start(whole, mode, ranks), 600) != [_FINISHED] * ranks:
        return Row((f"{mode}, {ranks} ranks", *["-"] * 7), "the uninterrupted job failed")
    taken, chance = time.monotonic() - began, random.Random(f"{mode} {ranks}")  # noqa: S311 - reproducible
    inside, saving, reported, slowest, finished = 0, 0, 0, 0.0, 0
    updates: set[int] = set()
    failure = ""
    for number in range(kills):
        attempt = _start(killed, mode, ranks)
        if number % 2:
            _wait_for_save(attempt, killed)
        time.sleep(chance.uniform(0, taken / 8))
        victim = chance.randrange(ranks)
        trains = all((killed / f"trains-{rank}").exists() for rank in range(ranks))
        _kill(attempt[victim])
        at = time.monotonic()
        codes = _wait(attempt, SECONDS if trains else 1)
        others = [code for rank, code in enumerate(codes) if rank != victim]
        if codes[victim] == -signal.SIGKILL and trains:
            inside += 1
            saving += _interrupted_save(killed)
            named = [_says(killed, rank, victim, attempt[victim]) for rank in range(ranks) if rank != victim]
            # The killed rank may have taken part in everything that the others still had to do.
            if all(code in (_REPORTED, _FINISHED) for code in others) and all(named):
                reported += 1
                slowest = max(slowest, time.monotonic() - at)
            else:
                failure = f"the other ranks ended with {others}"
        if all(code == _FINISHED for code in codes):
            finished += 1
            failure = failure or _difference(folder, ranks)
            (killed / "run").unlink()
        elif (killed / "run").exists():
            updates.add(load_state_file(killed / "run")["run"]["optimizer_step"])
    if _wait(_start(killed, mode, ranks), 600) != [_FINISHED] * ranks:
        return Row((f"{mode}, {ranks} ranks", *["-"] * 7), "the job could not resume")
    failure = failure or _difference(folder, ranks) or ("" if updates else "nothing was saved before a kill")
    between = f"{min(updates)} to {max(updates)}" if updates else "-"
    counts = (f"{kills}", f"{inside}", f"{saving}", f"{reported}", f"{slowest:.1f} s", between)
    if len(list((killed / "run.ranks").iterdir())) != 1:
        failure = failure or "unfinished saves were left"
    return Row((f"{mode}, {ranks} ranks", *counts, f"{finished + 1}, equal"), failure)


# ---- A rank ------------------------------------------------------------------------------------------


def _train(folder: Path, mode: str, rank: int, ranks: int, store: Path) -> None:
    """Train from the saved run if there is one; write a digest of what the rank holds at the end."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 30), nn.ReLU(), nn.BatchNorm1d(30), nn.Dropout(0.2), nn.Linear(30, 5), nn.Linear(5, 3)
    )
    data = torch.randn(SAMPLES, 8)
    torch.manual_seed(rank)
    engine = memfit.Engine(
        model,
        [memfit.Sharding(mode), memfit.Precision("fp16"), memfit.Accumulation(parts_per_batch=2)],
        optimizer=torch.optim.AdamW,
        loss=lambda model, batch: model(batch).float().square().mean(),
        callbacks=[memfit.Saving(folder / "run")],
    )
    if (folder / "run").exists():
        engine.load(folder / "run")
    (folder / f"trains-{rank}").touch()
    sampler = DistributedSampler(data, ranks, rank)
    engine.fit(DataLoader(data, batch_size=4, sampler=sampler), epochs=EPOCHS)
    (folder / f"digest-{rank}").write_text(f"{engine.optimizer_step} {_digest(engine)}")


def _digest(engine: memfit.Engine) -> str:
    digest = hashlib.sha256()
    state = engine.state_dict()
    for tensor in _tensors([state["model"], state["optimizer"], state["random"]["torch"]]):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.to_local() if hasattr(value, "to_local") else value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)


# ---- Processes ---------------------------------------------------------------------------------------


def _warm() -> None:
    """Import PyTorch's lazy modules before forking; no backward here, because it would start threads."""
    import torch.distributed.fsdp
    import torch.distributed.optim
    import torch.distributed.tensor

    import memfit.train.resume.sharded_tensor_files  # noqa: F401

    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()


def _start(folder: Path, mode: str, ranks: int) -> list[int]:
    """Start the ranks of a job as forks; return their process ids."""
    folder.mkdir(exist_ok=True)
    for rank in range(ranks):
        for name in ("trains", "error"):
            (folder / f"{name}-{rank}").unlink(missing_ok=True)
    store = Path(tempfile.mkdtemp(dir=folder.parent)) / "store"
    processes = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                _silence(folder / f"output-{rank}")
                _train(folder, mode, rank, ranks, store)
                code = _FINISHED
            except RankFailedError as error:
                (folder / f"error-{rank}").write_text(str(error))
                code = _REPORTED
            except BaseException as error:  # noqa: BLE001 - a fork must not run its parent's code
                (folder / f"error-{rank}").write_text(repr(error))
            finally:
                os._exit(code)
        processes.append(process)
    return processes


def _silence(path: Path) -> None:
    """Write what gloo prints about a broken connection to a file."""
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def _wait(processes: list[int], seconds: float) -> list[int]:
    """Wait for processes, at most so long, and end the others; return their exit codes."""
    until, codes = time.monotonic() + seconds, {}
    while len(codes) < len(processes):
        for process in processes:
            if process not in codes:
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    codes[process] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            for process in set(processes) - set(codes):
                _kill(process)
        time.sleep(0.002)
    return [codes[process] for process in processes]


def _wait_for_save(processes: list[int], folder: Path) -> None:
    """Wait until a job saves, or one of its ranks ends."""
    before = _written(folder)
    while _written(folder) == before and not any(
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) for process in processes
    ):
        time.sleep(0.0005)


def _written(folder: Path) -> int | None:
    path = folder / "run"
    return path.stat().st_mtime_ns if path.exists() else None


def _says(folder: Path, rank: int, victim: int, process: int) -> bool:
    """Return whether a rank that did not finish says which one was killed."""
    path = folder / f"error-{rank}"
    return not path.exists() or f"ank {victim} (process {process})" in path.read_text()


def _interrupted_save(folder: Path) -> bool:
    """Return whether a save was begun and not completed, or the folder of an older one not yet removed."""
    saves = {each.name for each in (folder / "run.ranks").glob("*")}
    return bool(saves - ({load_state_file(folder / "run")["folder"]} if (folder / "run").exists() else set()))


def _difference(folder: Path, ranks: int) -> str:
    for rank in range(ranks):
        found, wanted = ((folder / job / f"digest-{rank}").read_text() for job in ("killed", "whole"))
        if found != wanted:
            return f"rank {rank} ended with {found}; uninterrupted: {wanted}"
    return ""
