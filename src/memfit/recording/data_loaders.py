"""The loaders that the script creates and reads; on request, each pass over one ends after a few batches.

``len`` of a shortened loader is the number of batches that come, so that schedulers, progress bars and
trainers agree with it. Its data set, its sampler and their lengths are the script's own.
"""

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from memfit.patching.after_import import call_after_import
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.records import LoaderBatchSize, Shortened
from memfit.user_frame import innermost_user_line, is_user_file

_LOADERS = "torch.utils.data.dataloader"
_CREATED = Patch(
    f"{_LOADERS}:DataLoader", "__init__", why="learn where a loader is created, and its batch size"
)
_SAMPLER = Patch("torch.utils.data.sampler:BatchSampler", "__iter__", why="learn which loader is read")
_LOADER = Patch(
    f"{_LOADERS}:DataLoader",
    *("__len__", "_get_iterator", "_index_sampler"),
    why="end each pass after a few batches",
)
_PREPARED = Patch(
    "accelerate.data_loader:DataLoaderStateMixin", "begin", why="keep the last batch of a shorter pass"
)


class ScriptLoaders:
    """The loaders that the script has created since ``install``, and the one that it reads."""

    def __init__(self) -> None:
        self._hooks = InstalledHooks()
        self._creators: MutableMapping[Any, tuple[str, str]] = {}
        self._sizes: weakref.WeakKeyDictionary[Any, LoaderBatchSize] = weakref.WeakKeyDictionary()
        """By batch sampler: libraries such as accelerate wrap the loader in another that has the same one."""
        self.on_creation: list[Callable[[Any], None]] = []
        """Called with each new loader before PyTorch initialises it."""
        self.last: LoaderBatchSize | None = None
        """Of the loader that the script last began to read."""

    def install(self) -> None:
        """Follow loaders as soon as PyTorch has them."""
        call_after_import(_LOADERS, self._follow)

    def line_of(self, loader: Any) -> str:
        """Return the script's ``file:line`` that created a loader; empty if that was before ``install``."""
        return self._creators.get(loader, ("", ""))[0]

    def _follow(self) -> None:
        from torch.utils.weak import WeakIdKeyDictionary  # a class of the script's may have no hash

        self._creators = WeakIdKeyDictionary()
        self._hooks.wrap(_CREATED, "__init__", self._create)
        self._hooks.wrap(_SAMPLER, "__iter__", self._read)

    def _create(self, original: Callable[..., None], loader: Any, *args: Any, **kwargs: Any) -> None:
        created_by = self._creators[loader] = creating_line_and_library(sys._getframe(2))
        for action in self.on_creation:
            action(loader)
        original(loader, *args, **kwargs)
        if isinstance(loader.batch_size, int):
            self._sizes[loader.batch_sampler] = LoaderBatchSize(loader.batch_size, *created_by)

    def _read(self, original: Callable[..., Any], sampler: Any) -> Any:
        if (size := self._sizes.get(sampler)) is not None:
            self.last = replace(size, samples=_known_length(sampler.sampler))
        return original(sampler)


class LoaderShortener:
    """Makes loaders shorter from ``install`` on.

    Args:
        batches: of each pass, at most.
        loaders: knows the script's.
    """

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
        call_after_import(_LOADERS, self._shorten)
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
        self._measured = {sys.modules[_LOADERS].DataLoader}

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
            if kind is sys.modules[_LOADERS].DataLoader:
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
            full = _known_length(sampler.all)
            if full is None or full > self.batches:
                self._note(loader, full)
        return original(loader)

    def _begin_prepared(self, original: Callable[..., None], prepared: Any) -> None:
        """Have accelerate's ``gather_for_metrics`` cut nothing off: a shorter pass has a full last batch."""
        original(prepared)
        sampler = getattr(prepared, "base_dataloader", prepared)._index_sampler
        if isinstance(sampler, _First):
            full = _known_length(sampler.all)
            if full is not None and full > self.batches:
                prepared.remainder = 0

    def _note(self, loader: Any, full: int | None) -> None:
        self._found[Shortened(self._loaders.line_of(loader), self.batches, full)] = None


def loader_counts_batches(loader: Any, sampler: Any) -> bool:
    """Return whether a loader counts the batches of a pass itself, as those do that keep their workers.

    Its sampler never ends; a pass has as many batches as the loader is long.
    """
    kind, plain = type(loader), sys.modules[_LOADERS].DataLoader
    own = all(getattr(kind, name) is not getattr(plain, name) for name in ("__len__", "__iter__"))
    return own and _known_length(sampler) is None


def _is_endless(loader: Any, sampler: Any) -> bool:
    """Return whether a sampler may never end: then the script itself counts what it takes."""
    is_stream = isinstance(loader.dataset, sys.modules["torch.utils.data"].IterableDataset)
    return not is_stream and _known_length(sampler) is None


class _First:
    """The first of the batches, or samples, that a sampler has."""

    def __init__(self, sampler: Any, most: int) -> None:
        self.all, self._most = sampler, most

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.all), self._most)

    def __len__(self) -> int:
        return min(len(self.all), self._most)


def _known_length(sampler: Any) -> int | None:
    """Return how many samples, or batches, a sampler has; None if it does not know."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def creating_line_and_library(frame: FrameType) -> tuple[str, str]:
    """Return the script's line that created an object, and the library that did so for it.

    Args:
        frame: the frame that called the object's class.

    Returns:
        ``file:line``, and the name of a package; empty if the script itself created the object.
    """
    library = "" if is_user_file(frame.f_code.co_filename) else frame.f_globals.get("__name__", "")
    return innermost_user_line(frame), library.partition(".")[0]
