"""The loaders that the script creates and reads: where it created each, and their batch sizes."""

import sys
import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from types import FrameType
from typing import Any

from memfit.patching.after_import import call_after_import
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.records import LoaderBatchSize
from memfit.user_lines import innermost_user_line, is_user_file

LOADERS_MODULE = "torch.utils.data.dataloader"
_CREATED = Patch(
    f"{LOADERS_MODULE}:DataLoader", "__init__", why="learn where a loader is created, and its batch size"
)
_SAMPLER = Patch("torch.utils.data.sampler:BatchSampler", "__iter__", why="learn which loader is read")


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
        call_after_import(LOADERS_MODULE, self._follow)

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
            self.last = replace(size, samples=length_if_known(sampler.sampler))
        return original(sampler)


def loader_counts_batches(loader: Any, sampler: Any) -> bool:
    """Return whether a loader counts the batches of a pass itself, as those do that keep their workers.

    Its sampler never ends; a pass has as many batches as the loader is long.
    """
    kind, plain = type(loader), sys.modules[LOADERS_MODULE].DataLoader
    own = all(getattr(kind, name) is not getattr(plain, name) for name in ("__len__", "__iter__"))
    return own and length_if_known(sampler) is None


def length_if_known(sampler: Any) -> int | None:
    """Return how many samples, or batches, a sampler has; None if it does not know."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def creating_line_and_library(frame: FrameType) -> tuple[str, str]:
    """Return the script's line that created an object, and the library that did so for it.

    Returns:
        ``file:line``, and the name of a package; empty if the script itself created the object.
    """
    library = "" if is_user_file(frame.f_code.co_filename) else frame.f_globals.get("__name__", "")
    return innermost_user_line(frame), library.partition(".")[0]
