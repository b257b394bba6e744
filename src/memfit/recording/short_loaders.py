"""Let each pass over a ``DataLoader`` end after a few batches, as if its data set had no more.

``len`` of the loader is the number of batches that come, so that schedulers, progress bars and trainers agree
with it. Its data set, its sampler and their lengths are the script's own.
"""

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from memfit.patching.after_import import after_import
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.loader_batch_size import creator, known_length
from memfit.records import Shortened

_LOADERS, _ACCELERATE = "torch.utils.data.dataloader", "accelerate.data_loader"
_LOADER = Patch(
    f"{_LOADERS}:DataLoader",
    *("__init__", "__len__", "_get_iterator", "_index_sampler"),
    why="end each pass after a few batches",
)
_PREPARED = Patch(f"{_ACCELERATE}:DataLoaderStateMixin", "begin", why="keep the last batch of a shorter pass")


class ShortLoaders:
    """Makes loaders shorter from ``install`` on.

    Args:
        batches: of each pass, at most.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches
        """Of each pass, at most."""
        self._whole = False
        self._hooks = InstalledHooks()
        self._created: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._measured: set[type] = set()  # classes whose lengths are shortened
        self._found: dict[Shortened, None] = {}  # each once: a script may create a loader for each pass

    @property
    def shortened(self) -> tuple[Shortened, ...]:
        """What was shortened, in the order in which the script first read it."""
        return tuple(self._found)

    def install(self) -> None:
        """Shorten loaders as soon as PyTorch has them."""
        after_import(_LOADERS, self._shorten)
        after_import(_ACCELERATE, self._hook_accelerate)

    def _shorten(self) -> None:
        def shorter(sampler: Any) -> property:
            def index_sampler(self_: Any) -> Any:
                full = sampler.fget(self_)
                if self._whole or counts_batches(self_, full) or _is_endless(self_, full):
                    return full
                return _First(full, self.batches)

            return property(index_sampler)

        self._hooks.wrap(_LOADER, "__init__", self._create)
        self._hooks.wrap(_LOADER, "__len__", self._length)
        self._hooks.wrap(_LOADER, "_get_iterator", self._begin)
        self._hooks.replace(_LOADER, "_index_sampler", shorter)
        self._measured = {sys.modules[_LOADERS].DataLoader}

    @contextmanager
    def whole_passes(self) -> Iterator[None]:
        """Let loaders be as long as the script has them within: those whose passes begin here stay so."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    def _create(self, original: Callable[..., None], loader: Any, *args: Any, **kwargs: Any) -> None:
        self._created[loader] = creator(sys._getframe(2))[0]
        for kind in type(loader).__mro__:
            if "__len__" in vars(kind) and kind not in self._measured:
                self._measured.add(kind)
                self._hooks.wrap(_LOADER, "__len__", self._length, on=kind)
            if kind is sys.modules[_LOADERS].DataLoader:
                break
        original(loader, *args, **kwargs)

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
            full = known_length(sampler.all)
            if full is None or full > self.batches:
                self._note(loader, full)
        return original(loader)

    def _hook_accelerate(self) -> None:
        self._hooks.wrap(_PREPARED, "begin", self._begin_prepared)

    def _begin_prepared(self, original: Callable[..., None], prepared: Any) -> None:
        """Have accelerate's ``gather_for_metrics`` cut nothing off: the last batch of a shorter pass is full.

        Args:
            original: begins a pass over a loader.
            prepared: the loader, which ``accelerator.prepare`` has made of the script's.
        """
        original(prepared)
        sampler = getattr(prepared, "base_dataloader", prepared)._index_sampler
        if isinstance(sampler, _First):
            full = known_length(sampler.all)
            if full is not None and full > self.batches:
                prepared.remainder = 0

    def _note(self, loader: Any, full: int | None) -> None:
        self._found[Shortened(self._created.get(loader, ""), self.batches, full)] = None


def counts_batches(loader: Any, sampler: Any) -> bool:
    """Return whether a loader counts the batches of a pass itself, as those do that keep their workers.

    Its sampler never ends; a pass has as many batches as the loader is long.
    """
    kind, plain = type(loader), sys.modules[_LOADERS].DataLoader
    own = all(getattr(kind, name) is not getattr(plain, name) for name in ("__len__", "__iter__"))
    return own and known_length(sampler) is None


def _is_endless(loader: Any, sampler: Any) -> bool:
    """Return whether a sampler may never end: then the script itself counts what it takes."""
    is_stream = isinstance(loader.dataset, sys.modules["torch.utils.data"].IterableDataset)
    return not is_stream and known_length(sampler) is None


class _First:
    """The first of the batches, or samples, that a sampler has."""

    def __init__(self, sampler: Any, most: int) -> None:
        self._sampler, self._most = sampler, most

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._sampler), self._most)

    def __len__(self) -> int:
        return min(len(self._sampler), self._most)

    @property
    def all(self) -> Any:
        """The sampler."""
        return self._sampler
