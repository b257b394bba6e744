"""Let each pass over a ``DataLoader`` end after a few batches, as if its data set had no more.

``len`` of the loader is the number of batches that come, so that schedulers, progress bars and trainers agree
with it. Its data set, its sampler and their lengths are the script's own.
"""

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from memfit.ghost.patching.after_import import after_import
from memfit.recording.hooks import InstalledHooks
from memfit.recording.loader_batch_size import creator
from memfit.records import Shortened

_LOADERS = "torch.utils.data.dataloader"


class ShortLoaders:
    """Makes loaders shorter from ``install`` on.

    Args:
        batches: of each pass, at most.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._hooks = InstalledHooks()
        self._created: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._found: dict[Shortened, None] = {}  # each once: a script may create a loader for each pass

    @property
    def shortened(self) -> tuple[Shortened, ...]:
        """What was shortened, in the order in which the script first read it."""
        return tuple(self._found)

    def install(self) -> None:
        """Shorten loaders as soon as PyTorch has them."""
        after_import(_LOADERS, self._shorten)

    def _shorten(self) -> None:
        loader = sys.modules[_LOADERS].DataLoader
        sampler = loader._index_sampler.fget

        def index_sampler(self_: Any) -> Any:
            return _First(sampler(self_), self._batches)

        self._hooks.wrap(loader, "__init__", self._create)
        self._hooks.wrap(loader, "__len__", self._length)
        self._hooks.wrap(loader, "_get_iterator", self._begin)
        self._hooks.replace(loader, "_index_sampler", property(index_sampler))

    def _create(self, original: Callable[..., None], loader: Any, *args: Any, **kwargs: Any) -> None:
        original(loader, *args, **kwargs)
        self._created[loader] = creator(sys._getframe(2))[0]

    def _length(self, original: Callable[..., int], loader: Any) -> int:
        return min(original(loader), self._batches)  # of an IterableDataset, which no sampler decides

    def _begin(self, original: Callable[..., Any], loader: Any) -> Any:
        of = _full_length(loader)
        if of is None or of > self._batches:
            self._found[Shortened(self._created.get(loader, ""), self._batches, of)] = None
        return original(loader)


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


def _full_length(loader: Any) -> int | None:
    """Return how many batches a loader would have; None if it does not know."""
    try:
        return len(loader._index_sampler.all)
    except (TypeError, NotImplementedError):
        return None
