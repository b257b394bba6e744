"""Which batches the script gets: those of short passes, and the largest first."""

from itertools import chain
from typing import TYPE_CHECKING

from memfit.recording.data_loaders import ScriptLoaders, ShortLoaders
from memfit.recording.longest_batches import LongestBatches
from memfit.recording.short_trainers import ShortTrainers
from memfit.records import LoaderScan, Shortened
from memfit.run.options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from memfit.recording.recorder import Recorder


class ScriptBatches:
    """Shortens passes and looks for the longest batch, if the options of the run say so.

    Args:
        options: of the run.
        loaders: knows the script's.
        recorder: returns the recorder of this process; None before there is one.
    """

    def __init__(
        self, options: RunOptions, loaders: ScriptLoaders, recorder: "Callable[[], Recorder | None]"
    ) -> None:
        self._short: tuple[ShortLoaders | ShortTrainers, ...] = ()
        self._longest: LongestBatches | None = None
        short = None
        if options.batches is not None:
            short = ShortLoaders(options.batches, loaders)
            self._short = (short, ShortTrainers(options.batches))
        if options.scan is not None:
            self._longest = LongestBatches(options.scan, loaders, short, recorder)

    def install(self) -> None:
        """Change loaders and trainers as soon as they are imported."""
        if self._longest is not None:
            self._longest.install()  # first, so that it can draw from loaders that are not shortened
        for each in self._short:
            each.install()

    @property
    def shortened(self) -> tuple[Shortened, ...]:
        """What was shortened."""
        return tuple(chain.from_iterable(each.shortened for each in self._short))

    @property
    def scans(self) -> tuple[LoaderScan, ...]:
        """The loaders that were looked through."""
        return self._longest.scans if self._longest is not None else ()
