"""What ``memfit.estimate`` answers: a dry run, and the questions people ask of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rich.console import Console

from memfit.records import DryRun, Figure
from memfit.report.printable import Printed
from memfit.report.terminal.summary import print_summary

_TOTALS = {"allocated", "reserved", "process"}


@dataclass(frozen=True, slots=True, repr=False)
class Estimate(Printed):
    """What a model would use; printed, the summary."""

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

    def show(self, console: Console) -> None:
        """Print the summary, with what it needs where memory does not end."""
        print_summary(replace(self.run, in_all=self.total), console)
