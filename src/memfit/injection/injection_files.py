"""The files between memfit and the process of a script under a change: settings, and a report; both JSON."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from memfit.records import Change, OperationCounts, ShardingCalls

NEVER_CALLED = (
    "the script calls no module between the optimizer's creation and its step, where optimizer_state would "
    "be applied."
)
"""Why an optimizer does not have its part of a plan, until the script calls a module."""


class InjectionSettings(msgspec.Struct, frozen=True):
    """A change to inject into a script, and how: passed as JSON in a file."""

    change: Change
    """Its allocator's settings and the script's own options are left to what starts the script."""
    report: str = ""
    """The file that receives an ``InjectionReport``."""
    silent: bool = True
    """Whether the script gets no input, and its output is hidden."""
    operations: str = ""
    """The file that receives the ``StepOperations`` of a training step, if the change records one."""
    counts_backward: bool = False
    """Whether the backward's operations are counted, too, which takes memory."""
    late: bool = False
    """Whether GPU work finishes late: collectives cannot settle between two micro-batches."""
    strict: bool = False
    """Whether the script gets a ``UsageError`` if its updates would not be its own under the plan, which was
    applied."""


class InjectionReport(msgspec.Struct, frozen=True):
    """What became of a plan: written as JSON whenever it changes."""

    models: tuple[str, ...] = ()
    """The models with the plan: the class of each, and its optimizer's line."""
    refusals: tuple[tuple[str, str], ...] = ()
    """Why the plan was not applied to a model, and which, as in ``models``; empty if it is of no model."""
    caught: tuple[str, ...] = ()
    """A refusal of what the script does that the script has caught, and its line; empty if there is none."""
    uncalled: tuple[str, ...] = ()
    """Classes of models whose layers the script has called, but never the model, where the plan acts."""
    shares: tuple[int, ...] = ()
    """As in ``TrialResult``."""
    notes: tuple[str, ...] = ()
    """What a rank of the script computes otherwise than one process would."""
    sharding_calls: tuple[ShardingCalls, ...] = ()
    """As in ``TrialResult``."""
    unfit_optimizer: str = ""
    """Why the plan was not applied to an optimizer as it should have been; empty if it was."""
    operations: OperationCounts | None = None
    """Of the first update of the planned models, once it is made."""
    again: dict[str, int] = {}
    """By operation: how often its results were kept, and it was recomputed all the same."""
    missing: tuple[str, ...] = ()
    """Calls of operations whose results are to be kept, such as ``aten.mm.default:2``, that the first forward
    did not make."""
    cannot_accumulate: str = ""
    """Why gradients cannot be accumulated over micro-batches; empty if they can."""

    def why_uncalled(self) -> Iterator[tuple[str, str]]:
        """Yield each of ``uncalled``, and why the plan does not act on it."""
        for name in self.uncalled:
            why = f"the script does not call {name} itself, but its methods or submodules, and"
            yield name, f"{why} this part of the plan acts where the script calls the model"

    @property
    def is_unfit(self) -> bool:
        """Whether the script has done what the change does not permit, whatever it does afterwards."""
        return bool(self.cannot_accumulate or self.caught) or self.unfit_optimizer not in ("", NEVER_CALLED)


def injection_report_writer(path: Path) -> Callable[[InjectionReport], None]:
    """Return what writes reports to a file, each in place of the one before."""

    def write(report: InjectionReport) -> None:
        beside = path.with_suffix(".new")  # memfit reads the file at any time
        beside.write_bytes(msgspec.json.encode(report))
        beside.replace(path)

    return write


class InjectionReporter:
    """What became of a change so far."""

    def __init__(self, on_change: Callable[[InjectionReport], None]) -> None:
        self._on_change = on_change
        self._report = InjectionReport()

    def move(self, path: Path) -> None:
        """Report to a file from now on."""
        self._on_change = injection_report_writer(path)
        self.update()

    def update(self, **fields: Any) -> None:
        """Replace fields of the report."""
        self._report = msgspec.structs.replace(self._report, **fields)
        self._on_change(self._report)
