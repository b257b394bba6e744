"""Look through the batches of each loader when the script first reads it, and give it the largest first.

Batches are drawn from the script's own loader, with its sampler, its collate function and its workers.
Nothing here imports torch before the script does.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.loader_shortener import LoaderShortener
from memfit.recording.script_loaders import ScriptLoaders, loader_counts_batches
from memfit.records import LoaderScan

if TYPE_CHECKING:
    from memfit.recording.recorder import Recorder
    from memfit.recording.replaced_batches import ReplacedBatches

_MOST = 1000
"""Loaders that are looked through: fewer than a trace can have."""
_LOADER = Patch(
    "torch.utils.data.dataloader:DataLoader",
    "_get_iterator",
    why="look through a loader's batches when the script first reads it",
)


@dataclass(frozen=True, slots=True)
class _Scanned:
    """A data set that has been looked through in batches of one size."""

    dataset: Any
    batch_size: int | None
    served: "ReplacedBatches | None"
    """None for a loader with a single batch."""

    def is_of(self, loader: Any) -> bool:
        """Return whether a loader has been looked through: scripts create one for each evaluation."""
        return self.dataset is loader.dataset and self.batch_size == loader.batch_size


class LongestBatchFinder:
    """Looks through loaders from ``install`` on.

    Args:
        seconds: for each loader, at most.
        loaders: knows the script's.
        short: what shortens the passes that the script makes; None if nothing does.
        recorder: returns the recorder of this process; None before there is one.
    """

    def __init__(
        self,
        seconds: float,
        loaders: ScriptLoaders,
        short: LoaderShortener | None,
        recorder: "Callable[[], Recorder | None]",
    ) -> None:
        self._seconds, self._loaders, self._short, self._recorder = seconds, loaders, short, recorder
        self._hooks = InstalledHooks()
        self._scanned: list[_Scanned] = []

    @property
    def scans(self) -> tuple[LoaderScan, ...]:
        """What was seen, in the order in which the script first read the loaders."""
        return tuple(each.served.scan for each in self._scanned if each.served is not None)

    def install(self) -> None:
        """Look through loaders as soon as PyTorch has them."""
        self._hooks.wrap_when_imported(_LOADER, _get_iterator=self._begin)

    def _begin(self, original: Callable[..., Any], loader: Any) -> Any:
        recorder = self._recorder()
        if recorder is None or len(self._scanned) >= _MOST:
            return original(loader)
        scanned = next((each for each in self._scanned if each.is_of(loader)), None)
        if scanned is None:
            served = self._scan(original, loader, recorder)
            scanned = _Scanned(loader.dataset, loader.batch_size, served)
            self._scanned.append(scanned)
        iterator = original(loader)
        if scanned.served is not None and not scanned.served.is_over:
            scanned.served.serve(iterator, self._short.batches if self._short is not None else None)
        return iterator

    def _scan(
        self, original: Callable[..., Any], loader: Any, recorder: "Recorder"
    ) -> "ReplacedBatches | None":
        from memfit.recording.loader_scan import scan_loader
        from memfit.recording.replaced_batches import ReplacedBatches

        begin, length = time.monotonic(), self._length(loader)
        found = scan_loader(
            loader,
            lambda: self._in_whole_pass(original, loader),
            self._seconds,
            most=length if loader_counts_batches(loader, loader._index_sampler) else None,
            where=self._loaders.line_of(loader),
            of=length,
        )
        if recorder.steps.deadline is not None:  # the script's own time goes on only now
            recorder.steps.deadline += time.monotonic() - begin
        return None if found is None else ReplacedBatches(len(self.scans), *found, recorder)

    def _in_whole_pass(self, function: Callable[..., Any], loader: Any) -> Any:
        with self._short.whole_passes() if self._short is not None else nullcontext():
            return function(loader)

    def _length(self, loader: Any) -> int | None:
        warns = loader._IterableDataset_len_called  # of more batches than len() has said
        try:
            length: int = self._in_whole_pass(len, loader)
        except (TypeError, NotImplementedError):
            return None
        finally:
            loader._IterableDataset_len_called = warns
        return length
