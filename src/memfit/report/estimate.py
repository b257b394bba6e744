"""What ``memfit.estimate`` answers: a dry run, and the questions people ask of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memfit.records import DryRun, Figure
from memfit.report.terminal import as_text, print_summary

_TOTALS = {"allocated", "reserved", "process"}


@dataclass(frozen=True, slots=True, repr=False)
class Estimate:
    """What a model would use. Printed, or as the last line of a notebook's cell, it is the summary."""

    run: DryRun
    """On the GPU asked for."""
    unlimited: DryRun
    """The same where it fits; otherwise, a run on a GPU with memory enough."""
    again: Callable[[str, int | None], DryRun]
    """Runs the same on another GPU, by name, with so many bytes."""

    @property
    def total(self) -> Figure:
        """Bytes that the process needs at its peak, the CUDA context included."""
        return self.unlimited.peak_process

    @property
    def breakdown(self) -> Mapping[str, Figure]:
        """What is there at the peak, by name; sums to ``total``."""
        return {term.name: term.figure for term in self.unlimited.terms if term.name not in _TOTALS}

    def fits(self, gpu: str | None = None) -> bool:
        """Say whether it fits the GPU that was asked for, or another, on which it is run now.

        Run, not compared: an allocator short of memory empties its cache and goes on.

        Raises:
            UnknownDeviceError: no such device.
        """
        done = self.run if gpu is None else self.again(gpu, None)
        return done.verdict == "fits"

    def __str__(self) -> str:
        in_all = None if self.unlimited is self.run else self.total
        return as_text(lambda console: print_summary(self.run, console, in_all=in_all))

    __repr__ = __str__
