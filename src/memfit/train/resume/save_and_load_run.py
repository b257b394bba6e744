"""Save a run to a path, and resume from one: a file, and with several ranks a folder beside it.

    run                       plain values that all ranks share, and the name of the folder of this save
    run.ranks/
      120-9f2c41/             the save after update 120
        .metadata             tensors: torch.distributed.checkpoint
        __0_0.distcp
        __1_0.distcp
        rank-0                what differs between ranks
        rank-1

The folder is written first, by all ranks. Then ``run`` is replaced atomically: a run is saved completely or
not at all, whenever a rank or a machine dies. Older folders are removed last.

On the same number of ranks, a saved run resumes bit for bit. On another, parameters and optimizer state are
divided anew, ranks that existed continue with their random numbers, and new ranks are seeded.
"""

import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.recording.optimizer_accessors import local_optimizer
from memfit.train.ranks.rank_agreement import SingleRank
from memfit.train.resume import state_file
from memfit.train.resume.engine_state import get_engine_state, load_engine_state
from memfit.train.resume.saved_engine_parts import (
    EngineParts,
    indices_of_own_parameters,
    model_without_wrappers,
    parameter_names_by_group,
)
from memfit.train.resume.saved_run_compatibility import (
    check_no_open_window,
    check_parameter_groups,
    check_run_suits_engine,
)
from memfit.train.resume.saved_run_format import (
    FOLDER_NAME,
    VERSION,
    RankRunFile,
    SavedOptimizerParameterState,
    SharedRunFile,
    check_rank_run_file,
    check_saved_run,
    check_shared_run_file,
)
from memfit.train.resume.sharded_tensor_files import (
    load_sharded_tensors,
    read_tensor_index,
    save_sharded_tensors,
)
from memfit.train.resume.split_run_state import (
    empty_tensors_of_rank,
    is_dtensor,
    join_run_state,
    random_state_of_new_rank,
    random_state_with_all_gpus,
    random_state_with_own_gpu,
    rank_part_of_single_process_run,
    split_run_state,
    with_changed_random_states,
)


class ResumableRun(ABC):
    """Saves and resumes what ``_parts`` returns."""

    epoch: int
    """Epochs that are completed."""

    @abstractmethod
    def _parts(self) -> EngineParts:
        """Return what makes up the run."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that a run needs to resume bit for bit, inside a window too: tensors and plain values.

        As with PyTorch's own, the tensors are the run's, and training changes them. Copy them
        (``copy.deepcopy``) to keep a snapshot in memory.

        Raises:
            TornUpdateError: the last update was interrupted.
            UsageError: a backward was interrupted, or micro-batches are carried over to the next epoch.
        """
        return get_engine_state(self._parts())

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume from a state, which stays unchanged; the next epoch continues at its position.

        Raises:
            UsageError: the state does not suit this engine; nothing was loaded.
            FileFormatError: the state is damaged; nothing was loaded.
        """
        parts = self._parts()
        load_engine_state(parts, saved)
        self.epoch = parts.epoch

    def save(self, path: str | Path) -> None:
        """Write the run to a file, atomically; with several ranks, to a file and a folder beside it.

        All ranks must call this at the same point of training, and see the same file system.

        Raises:
            UsageError: the run cannot be saved at this point, or has values that a file cannot hold.
            OutputError: a rank could not write.
            RankFailedError: another rank could not save, or is gone.
        """
        parts, path = self._parts(), Path(path)
        if _is_divided(parts):
            _save_divided_run(parts, path)
        else:
            state_file.save_state_file(get_engine_state(parts), path)

    def load(self, path: str | Path) -> None:
        """Resume from what ``save`` wrote, on as many ranks as saved it or on others; all ranks call this.

        Raises:
            FileFormatError: the file or its folder is something else, or damaged; nothing was loaded.
            UsageError: the state does not suit this engine; nothing was loaded.
            RankFailedError: another rank could not load; nothing was loaded.
        """
        parts, path = self._parts(), Path(path)
        ranks = parts.ranks
        with _all_or_none(ranks, "engine.load"):
            saved = state_file.load_state_file(path)
            reads_folder = "folder" in saved
            if reads_folder:
                shared = check_shared_run_file(saved)
                folder = _folders(path) / shared["folder"]
                own, entries = _read_rank_files(parts, shared, folder)
                index = read_tensor_index(folder)
                tensors = empty_tensors_of_rank(parts, shared["run"], entries, index.state_dict_metadata)
            elif _is_divided(parts):
                saved = _divide(parts, saved)
        if reads_folder:
            ranks.guarded(lambda: load_sharded_tensors(tensors, index, folder, ranks.control))
            saved = join_run_state(parts, shared["run"], own, entries, tensors)
        load_engine_state(parts, saved, lambda: _all_or_none(ranks, "engine.load"))
        self.epoch = parts.epoch


def _save_divided_run(parts: EngineParts, path: Path) -> None:
    """Write a run of several ranks: first what they divide, then the file that names it."""
    ranks, folders = parts.ranks, _folders(path)
    with _all_or_none(ranks, "engine.save"):
        run = split_run_state(parts, get_engine_state(parts))
        own = with_changed_random_states(run.own, random_state_with_own_gpu)
        owners = _owners(parts)
    # A number that rank 0 draws: the folder must be new even if the run was here before.
    (token,) = ranks.agree("engine.save", secrets.randbits(48) if ranks.rank == 0 else 0)
    name = f"{run.shared['optimizer_step']}-{int(token):012x}"
    folder = folders / name
    with _all_or_none(ranks, "engine.save"):
        folder.mkdir(parents=True, exist_ok=True)
        kept = {index: each for index, each in run.entries.items() if owners[index] == ranks.rank}
        rank_file: RankRunFile = {"version": VERSION, "rank": ranks.rank, "entries": kept, "run": own}
        state_file.save_state_file({**rank_file}, folder / _file_of(ranks.rank))
    ranks.guarded(lambda: save_sharded_tensors(run.tensors, folder, ranks.control))
    with _all_or_none(ranks, "engine.save"):
        if ranks.rank == 0:
            _expect_shared_folder(folder, ranks.size)
            shared: SharedRunFile = {
                "version": VERSION,
                "ranks": ranks.size,
                "folder": name,
                "owners": owners,
                "run": run.shared,
            }
            for each in (folder, folders, folders.parent):
                state_file.flush_folder(each)
            state_file.save_state_file({**shared}, path)
            _remove_others(folders, name)


@contextmanager
def _all_or_none(ranks: SingleRank, call: str) -> Iterator[None]:
    """Complete only if all ranks do: a rank that fails ends the others with its error."""
    try:
        yield
    except Exception as error:
        ranks.report(error, call, waiting=True)
        raise
    ranks.agree(call)


def _is_divided(parts: EngineParts) -> bool:
    """Return whether a file cannot hold the run: there are several ranks, or tensors are DTensors."""
    return parts.ranks.size > 1 or any(
        is_dtensor(each) for each in model_without_wrappers(parts).parameters()
    )


# ---- Files ---------------------------------------------------------------------------------------------


def _folders(path: Path) -> Path:
    return path.with_name(f"{path.name}.ranks")


def _file_of(rank: int) -> str:
    return f"rank-{rank}"


def _owners(parts: EngineParts) -> list[int]:
    """Return the rank that saves each parameter's optimizer state: one that updates it."""
    count = sum(map(len, (group["params"] for group in parts.optimizer.param_groups)))
    if local_optimizer(parts.optimizer) is parts.optimizer:
        return [0] * count
    own: list[list[int]] = [[]] * parts.ranks.size
    torch.distributed.all_gather_object(
        own, indices_of_own_parameters(parts.optimizer), group=parts.ranks.control
    )
    rank_of = {index: rank for rank, indices in enumerate(own) for index in indices}
    return [rank_of[index] for index in range(count)]


def _expect_shared_folder(folder: Path, ranks: int) -> None:
    for rank in range(ranks):
        if not (folder / _file_of(rank)).exists():
            raise UsageError(
                f"Cannot save the run to {folder}: rank {rank} has written its file there, but rank 0 does "
                "not see it. Save to a file system that all machines of the job share."
            )


def _remove_others(folders: Path, name: str) -> None:
    """Remove older saves, and those that were never completed."""
    for folder in folders.iterdir():
        if folder.name != name and FOLDER_NAME.match(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def _read_rank_files(
    parts: EngineParts, shared: SharedRunFile, folder: Path
) -> tuple[dict[str, Any], dict[int, SavedOptimizerParameterState]]:
    """Return this rank's part of the state, and the entries of the parameters that it updates."""
    rank, ranks = parts.ranks.rank, parts.ranks.size
    check_parameter_groups(parameter_names_by_group(parts), shared["run"]["groups"])
    known = rank if rank < shared["ranks"] else 0
    owner_of = {index: shared["owners"][index] for index in indices_of_own_parameters(parts.optimizer)}
    files = {
        each: check_rank_run_file(state_file.load_state_file(folder / _file_of(each)), each)
        for each in sorted({known, *owner_of.values()})
    }
    own = files[known]["run"]
    if shared["ranks"] != ranks:
        check_no_open_window(own, shared["ranks"], ranks)
    if known != rank:
        own = with_changed_random_states(own, lambda state: random_state_of_new_rank(state, rank))
    entries = {
        index: files[owner]["entries"][index]
        for index, owner in owner_of.items()
        if index in files[owner]["entries"]
    }
    return with_changed_random_states(own, random_state_with_all_gpus), entries


def _divide(parts: EngineParts, saved: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's part of a run that a single process saved."""
    state, rank, ranks = check_saved_run(saved), parts.ranks.rank, parts.ranks.size
    check_run_suits_engine(parts, state)
    if ranks > 1:
        check_no_open_window(saved, 1, ranks)
    if rank:
        saved = with_changed_random_states(saved, lambda state: random_state_of_new_rank(state, rank))
    return rank_part_of_single_process_run(parts, saved)
