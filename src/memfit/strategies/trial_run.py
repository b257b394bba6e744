"""A script run again with a change that is not in it, and what came of it."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from msgspec import json
from msgspec.structs import replace

from memfit.analysis.advice import Change, Trial, completed
from memfit.errors import MemfitError
from memfit.records import ScriptEnd
from memfit.run.parent import Progress
from memfit.run.settings import ChildSettings
from memfit.run.traced import traced
from memfit.strategies.inject_plan import Intervention

_UNATTENDED = "memfit.strategies.inject_plan"


def run_again(
    command: tuple[str, ...],
    settings: ChildSettings,
    change: Change,
    on_progress: Callable[[Progress], None],
) -> Trial | ScriptEnd:
    """Run a script of which nobody knows whether it will work, silently and without input.

    Args:
        command: the script's ``sys.argv``.
        settings: as for a run of the script alone.
        change: what it is run with.
        on_progress: as for ``run_script``.

    Returns:
        The run; how it ended if that was not its end; or why it was not run with the change.

    Raises:
        KeyboardInterrupt: somebody has had enough.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
        models = Path(folder) / "models"
        models.touch()
        told = Intervention(settings.module, change.strategies, change.fused, str(models))
        try:
            trace = traced(
                (_UNATTENDED, json.encode(told).decode(), *command),
                replace(settings, module=True),
                None,
                on_progress,
            )
        except MemfitError as error:
            why = str(error).replace(_UNATTENDED, command[0])
            return ScriptEnd("refused", error.exit_code, f"run again, without input, {why}")
        if trace.end.reason == "interrupted":
            raise KeyboardInterrupt
        if not completed(trace.end):
            return trace.end
        changed = tuple(models.read_text().split())
        if change.strategies and not changed:  # updates by hand, a plan of its own, no blocks
            suits = f"{' with '.join(change.strategies)} suits no model whose parameters an optimizer takes"
            return ScriptEnd("refused", 0, suits)
        return Trial(trace, changed)
