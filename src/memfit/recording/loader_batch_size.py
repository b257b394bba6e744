"""The batch size of the script's ``DataLoader``, and the line that created it."""

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memfit.patching.after_import import after_import
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.records import LoaderBatchSize
from memfit.user_frame import is_user_file, user_line

if TYPE_CHECKING:
    from types import FrameType

_LOADER = Patch("torch.utils.data.dataloader:DataLoader", "__init__", why="learn the script's batch size")
_SAMPLER = Patch("torch.utils.data.sampler:BatchSampler", "__iter__", why="learn which loader is read")


class LoaderBatchSizes:
    """Follows which loader the script reads.

    A loader is identified by its batch sampler: libraries such as accelerate wrap the loader in another that
    has the same sampler.
    """

    def __init__(self) -> None:
        self._hooks = InstalledHooks()
        self._created: weakref.WeakKeyDictionary[Any, LoaderBatchSize] = weakref.WeakKeyDictionary()
        self.last: LoaderBatchSize | None = None
        """Of the loader that the script last began to read."""

    def install(self) -> None:
        """Follow loaders as soon as PyTorch has them."""
        after_import("torch.utils.data.dataloader", self._follow)

    def _follow(self) -> None:
        self._hooks.wrap(_LOADER, "__init__", self._create)
        self._hooks.wrap(_SAMPLER, "__iter__", self._read)

    def _create(self, original: Callable[..., None], loader: Any, *args: Any, **kwargs: Any) -> None:
        original(loader, *args, **kwargs)
        if isinstance(loader.batch_size, int):
            self._created[loader.batch_sampler] = LoaderBatchSize(
                loader.batch_size, *creator(sys._getframe(2))
            )

    def _read(self, original: Callable[..., Any], sampler: Any) -> Any:
        if (created := self._created.get(sampler)) is not None:
            self.last = replace(created, samples=known_length(sampler.sampler))
        return original(sampler)


def known_length(sampler: Any) -> int | None:
    """Return how many samples, or batches, a sampler has; None if it does not know."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def creator(frame: "FrameType") -> tuple[str, str]:
    """Return the script's line that created an object, and the library that did so for it.

    Args:
        frame: the frame that called the object's class.

    Returns:
        ``file:line``, and the name of a package; empty if the script itself created the object.
    """
    library = "" if is_user_file(frame.f_code.co_filename) else frame.f_globals.get("__name__", "")
    return user_line(frame), library.partition(".")[0]
