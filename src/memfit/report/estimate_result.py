"""What ``memfit.estimate`` returns: a dry run with its total, its breakdown, and whether it fits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from rich.console import Console

from memfit.records import DryRun, Figure
from memfit.records.printable_result import PrintableResult
from memfit.report.terminal.summary import print_summary


@dataclass(frozen=True, slots=True, repr=False)
class Estimate(PrintableResult):
    """The memory a model would use; printing it shows the summary."""

    run: DryRun
    """The run on the GPU requested."""
    unlimited: DryRun
    """The same run if it fits; otherwise a run with unlimited memory."""
    again: Callable[[str, int | None], DryRun]
    """Runs the model on another GPU, given its name and its memory in bytes (None: the GPU's own)."""

    @property
    def total(self) -> Figure:
        """Bytes of the process at its peak, the CUDA context included.

        They are those with unlimited memory if the model does not fit; ``unlimited.needs`` is the memory of
        the smallest GPU on which it fits.
        """
        return self.unlimited.peak_process

    @property
    def breakdown(self) -> Mapping[str, Figure]:
        """What is in memory at the peak, by name; sums to ``total``."""
        return {term.name: term.figure for term in self.unlimited.terms if not term.is_total}

    def fits(self, gpu: str | None = None) -> bool:
        """Return whether it fits the GPU requested, or another GPU, on which it runs now.

        The answer is False if the verdict is ``tight``. Comparing totals would not do: an allocator short of
        memory empties its cache and continues.

        Raises:
            UnknownDeviceError: no such device.
        """
        done = self.run if gpu is None else self.again(gpu, None)
        return done.verdict == "fits"


def print_estimate(result: Estimate, console: Console) -> None:
    """Print the summary."""
    whole = replace(
        result.run,
        needs=result.unlimited.needs,
        needs_without_workspaces=result.unlimited.needs_without_workspaces,
        bounds=result.unlimited.bounds or result.run.bounds,
    )
    print_summary(whole, console, hints=False)
