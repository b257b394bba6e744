"""The process of a script under a plan: ``main()`` with ``SETTINGS SCRIPT.py ARGS...`` as arguments.

allocator's settings    in the environment, before the script imports torch
the other strategies    when the script creates its optimizer, as under ``memfit dry-run --plan``
the watch               from the import of torch to the end of the process
"""

import os
import sys
from pathlib import Path

import msgspec

from memfit.errors import TargetError, UsageError
from memfit.ghost.build.torch_install import installed_torch_version
from memfit.injection.inject_plan import inject_change
from memfit.injection.injection_files import InjectionSettings
from memfit.injection.one_of_several_ranks import become_one_process, leave_job
from memfit.injection.save_models_without_plan import save_models_without_plan
from memfit.patching.after_import import call_after_import
from memfit.patching.installed_hooks import InstalledHooks
from memfit.planning.plan_file import PlanFile
from memfit.run.run_script_as_python import print_exception_as_python_does, run_script_as_main
from memfit.script_training.plan_application_watcher import CONF, PlanApplicationWatcher
from memfit.strategies.read_plan_or_settings import read_plan_or_settings
from memfit.termination_signals import INTERRUPTED
from memfit.versions import __version__
from memfit.watching.prediction import PlannedPeak
from memfit.watching.watch import Watch, watch


class TrainSettings(msgspec.Struct, frozen=True):
    """How to train a script: passed as JSON."""

    plan: str
    """The file that ``memfit plan -o`` wrote."""
    module: bool = False
    """As in ``RunOptions``."""
    prediction: str = ""
    """The trace of a dry run under the plan; empty for the peak that the plan predicts."""
    as_far_as_it_goes: bool = False
    """Whether the script trains even if a part of the plan is not applied."""

    def to_json(self) -> str:
        """Return the settings as JSON."""
        return msgspec.json.encode(self).decode()


def main() -> None:
    """Train the script on the command line."""
    settings = msgspec.json.decode(sys.argv[1], type=TrainSettings)
    command = tuple(sys.argv[2:])
    plan = read_plan_or_settings(Path(settings.plan))
    outcome = PlanApplicationWatcher(
        settings.plan, plan, command, as_far_as_it_goes=settings.as_far_as_it_goes
    )
    outcome.begin({"memfit": __version__, "torch": installed_torch_version()})
    change = outcome.carried_out
    sharded = "sharding" in change.plan
    if sharded:
        become_one_process(InstalledHooks())
    if change.allocator:
        os.environ[CONF] = change.allocator
    whole = not outcome.left_out and plan.is_sharded == sharded
    inject_change(InjectionSettings(change, silent=False, strict=True), outcome.report)
    call_after_import("torch", outcome.watch_steps)
    call_after_import("torch", save_models_without_plan)
    call_after_import("torch", _watch(settings, plan, command, whole=whole).start)
    try:
        run_script_as_main(command + change.arguments, module=settings.module)
    except SystemExit as end:
        if end.code:
            raise
    except BaseException as error:  # noqa: BLE001 - as Python does
        if isinstance(error, UsageError):
            outcome.refused(error)
        print_exception_as_python_does(error, __file__)
        sys.exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
    finally:
        ends_well = outcome.end()
    if sharded:
        leave_job()
    if not ends_well:
        sys.exit(TargetError.exit_code)


def _watch(settings: TrainSettings, plan: PlanFile, command: tuple[str, ...], *, whole: bool) -> Watch:
    """Return the watch of the run: beside a dry run, or beside the peak that was planned for this command."""
    if settings.prediction:
        return watch(settings.prediction)
    allocated = plan.allocated_for(command) if whole else None
    planned = None if allocated is None else PlannedPeak(allocated)
    return Watch(planned, None, Path.cwd(), labels=False, files=3)
