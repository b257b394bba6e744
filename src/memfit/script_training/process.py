"""The script's process: ``main()`` with ``SETTINGS SCRIPT.py ARGS...`` as arguments.

allocator's settings    in the environment, before the script imports torch
the other strategies    when the script creates its optimizer, as under ``memfit dry-run --plan``
the watch               from the import of torch to the end of the process
"""

import os
import sys
from pathlib import Path

import msgspec

from memfit.ctrl_c import INTERRUPTED
from memfit.ghost.patching.after_import import after_import
from memfit.planning.plan_file import PlanFile, read_plan
from memfit.report.escape import escaped
from memfit.run.script import print_as_python_does, run_as_main
from memfit.script_training.carried_out import CarriedOut
from memfit.strategies.inject_plan import inject
from memfit.strategies.intervention import InjectionReport, Intervention
from memfit.strategies.trial_run import why_again
from memfit.watching.prediction import PlannedPeak
from memfit.watching.watch import Watch, watch

_CONF = "PYTORCH_ALLOC_CONF"


class TrainSettings(msgspec.Struct, frozen=True):
    """How to train a script: passed as JSON."""

    plan: str
    """The file that ``memfit plan -o`` wrote."""
    module: bool = False
    """As in ``RunOptions``."""
    prediction: str = ""
    """The trace of a dry run under the plan; empty for the peak that the plan predicts."""

    def to_json(self) -> str:
        """Return the settings as JSON."""
        return msgspec.json.encode(self).decode()


def main() -> None:
    """Train the script on the command line."""
    settings = msgspec.json.decode(sys.argv[1], type=TrainSettings)
    command = tuple(sys.argv[2:])
    plan = read_plan(Path(settings.plan))
    carried_out = CarriedOut.of(plan)
    lines = PlanLines(settings.plan, plan, carried_out)
    lines.begin()
    if plan.allocator:
        os.environ[_CONF] = plan.allocator
    change = Intervention(
        carried_out.settings, plan.optimizer, plan.fused, None, "", silent=False, strict=True
    )
    inject(change, lines.report)
    after_import("torch", _watch(settings, plan, command, carried_out).start)
    try:
        run_as_main(command + carried_out.arguments, module=settings.module)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - as Python does
        print_as_python_does(error, __file__)
        sys.exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
    finally:
        lines.end()


def _watch(settings: TrainSettings, plan: PlanFile, command: tuple[str, ...], made: CarriedOut) -> Watch:
    """Return the watch of the run: beside a dry run, or beside the peak that was planned for this command."""
    if settings.prediction:
        return watch(settings.prediction)
    allocated = plan.allocated_for(command) if not made.left_out else None
    planned = None if allocated is None else PlannedPeak(allocated)
    return Watch(planned, None, Path.cwd(), labels=False, files=3)


class PlanLines:
    """Says what becomes of a plan, on standard error; the first rank does, if there are several.

    Args:
        file: the plan's.
        plan: the plan.
        carried_out: what of it is carried out.
    """

    def __init__(self, file: str, plan: PlanFile, carried_out: CarriedOut) -> None:
        self._file, self._plan, self._carried_out = file, plan, carried_out
        self._said: set[str] = set()
        self._last = InjectionReport()

    def begin(self) -> None:
        """Say what will be applied, and what not."""
        what = [*self._carried_out.settings, *["fused optimizers"] * self._plan.fused]
        what += [f"{_CONF}={self._plan.allocator}"] * bool(self._plan.allocator)
        what += [" ".join(self._carried_out.arguments)] * bool(self._carried_out.arguments)
        self._say(f"training under {self._file}: {', '.join(what) or 'nothing to apply'}")
        for part in self._carried_out.left_out:
            self._say(f"NOT APPLIED, as it takes a change of the script: {part}")

    def report(self, report: InjectionReport) -> None:
        """Say what has changed: a model has got the plan, or was refused it."""
        self._last = report
        for model in report.models:
            other = "" if self._plan.made_for(model) else f"; it was made for {', '.join(self._plan.models)}"
            self._say(f"applied to {model}{other}")
        if report.operations is not None:
            planned = self._plan.operations
            same = planned is not None and report.operations.recomputes_as(planned)
            self._say(f"recomputed {report.operations}{', as planned' * same}")
        if report.again:
            self._say(f"NOT AS PLANNED: {why_again(report.again)}")
        for why in report.refusals:
            self._say(f"NOT APPLIED: {why}")

    def end(self) -> None:
        """Say what was not applied in the end."""
        if not self._carried_out.settings:
            return
        if self._last.unfit_optimizer:
            self._say(f"NOT APPLIED: {self._last.unfit_optimizer}")
        if not self._last.models and not self._last.refusals:
            self._say("NOT APPLIED: no optimizer of this process has taken the parameters of a model.")

    def _say(self, text: str) -> None:
        if text not in self._said and os.environ.get("RANK", "0") == "0":
            self._said.add(text)
            print(escaped(f"memfit: {text}"), file=sys.stderr, flush=True)
