"""A run of training that can be saved and resumed: ``memfit.Engine``'s methods for that."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from memfit.train.resume import engine_state
from memfit.train.resume.engine_parts import EngineParts
from memfit.train.resume.run_files import load_run, save_run


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
        return engine_state.get_state(self._parts())

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Resume from a state, which stays unchanged; the next epoch continues at its position.

        Raises:
            UsageError: the state does not suit this engine; nothing was loaded.
            FileFormatError: the state is damaged; nothing was loaded.
        """
        parts = self._parts()
        engine_state.load_state(parts, saved)
        self.epoch = parts.epoch

    def save(self, path: str | Path) -> None:
        """Write the run to a file, atomically; with several ranks, to a file and a folder beside it.

        All ranks must call this at the same point of training, and see the same file system.
        """
        save_run(self._parts(), Path(path))

    def load(self, path: str | Path) -> None:
        """Resume from what ``save`` wrote, on as many ranks as saved it or on others; all ranks call this.

        Raises:
            FileFormatError: the file or its folder is something else, or damaged; nothing was loaded.
            UsageError: the state does not suit this engine; nothing was loaded.
        """
        parts = self._parts()
        load_run(parts, Path(path))
        self.epoch = parts.epoch
