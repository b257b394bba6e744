"""End each pass over the script's loaders after a few batches.

``len`` of a shortened loader is the number of batches that come, so that schedulers, progress bars and
trainers agree with it. Its data set, its sampler and their lengths are the script's own.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from memfit.patching.after_import import call_after_import
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.script_loaders import (
    LOADERS_MODULE,
    ScriptLoaders,
    length_if_known,
    loader_counts_batches,
)
from memfit.records import Shortened

_LOADER = Patch(
    f"{LOADERS_MODULE}:DataLoader",
    *("__len__", "_get_iterator", "_index_sampler"),
    why="end each pass after a few batches",
)
_PREPARED = Patch(
    "accelerate.data_loader:DataLoaderStateMixin", "begin", why="keep the last batch of a shorter pass"
)


class LoaderShortener:
    """Makes loaders shorter from ``install`` on."""

    def __init__(self, batches: int, loaders: ScriptLoaders) -> None:
        self.batches = batches
        """Of each pass, at most."""
        self._whole = False
        self._hooks = InstalledHooks()
        self._loaders = loaders
        self._measured: set[type] = set()  # classes whose lengths are shortened
        self._found: dict[Shortened, None] = {}  # each once: a script may create a loader for each pass

    @property
    def shortened(self) -> tuple[Shortened, ...]:
        """What was shortened, in the order in which the script first read it."""
        return tuple(self._found)

    def install(self) -> None:
        """Shorten loaders as soon as PyTorch has them."""
        self._loaders.on_creation.append(self._shorten_length)
        call_after_import(LOADERS_MODULE, self._shorten)
        self._hooks.wrap_when_imported(_PREPARED, begin=self._begin_prepared)

    def _shorten(self) -> None:
        def shorter(sampler: Any) -> property:
            def index_sampler(self_: Any) -> Any:
                full = sampler.fget(self_)
                if self._whole or loader_counts_batches(self_, full) or _is_endless(self_, full):
                    return full
                return _First(full, self.batches)

            return property(index_sampler)

        self._hooks.wrap(_LOADER, "__len__", self._length)
        self._hooks.wrap(_LOADER, "_get_iterator", self._begin)
        self._hooks.replace(_LOADER, "_index_sampler", shorter)
        self._measured = {sys.modules[LOADERS_MODULE].DataLoader}

    @contextmanager
    def whole_passes(self) -> Iterator[None]:
        """Let loaders be as long as the script has them within: those whose passes begin here stay so."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    def _shorten_length(self, loader: Any) -> None:
        """Shorten the lengths that the classes of a new loader return themselves."""
        for kind in type(loader).__mro__:
            if "__len__" in vars(kind) and kind not in self._measured:
                self._measured.add(kind)
                self._hooks.wrap(_LOADER, "__len__", self._length, on=kind)
            if kind is sys.modules[LOADERS_MODULE].DataLoader:
                break

    def _length(self, original: Callable[..., int], loader: Any) -> int:
        # Of an IterableDataset, no sampler decides, and of a loader that counts batches, its own length.
        full = original(loader)
        if self._whole:
            return full
        if full > self.batches and not isinstance(loader._index_sampler, _First):
            self._note(loader, full)
        return min(full, self.batches)

    def _begin(self, original: Callable[..., Any], loader: Any) -> Any:
        sampler = loader._index_sampler
        if isinstance(sampler, _First):
            full = length_if_known(sampler.all)
            if full is None or full > self.batches:
                self._note(loader, full)
        return original(loader)

    def _begin_prepared(self, original: Callable[..., None], prepared: Any) -> None:
        """Have accelerate's ``gather_for_metrics`` cut nothing off: a shorter pass has a full last batch."""
        original(prepared)
        sampler = getattr(prepared, "base_dataloader", prepared)._index_sampler
        if isinstance(sampler, _First):
            full = length_if_known(sampler.all)
            if full is not None and full > self.batches:
                prepared.remainder = 0

    def _note(self, loader: Any, full: int | None) -> None:
        self._found[Shortened(self._loaders.line_of(loader), self.batches, full)] = None


def _is_endless(loader: Any, sampler: Any) -> bool:
    """Return whether a sampler may never end: then the script itself counts what it takes."""
    is_stream = isinstance(loader.dataset, sys.modules["torch.utils.data"].IterableDataset)
    return not is_stream and length_if_known(sampler) is None


class _First:
    """The first of the batches, or samples, that a sampler has."""

    def __init__(self, sampler: Any, most: int) -> None:
        self.all, self._most = sampler, most

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.all), self._most)

    def __len__(self) -> int:
        return min(len(self.all), self._most)
