"""Verify a plan: the gradients of one update, computed with the plan and without."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from memfit.card.detect_card import detect_card
from memfit.errors import UnsuitableEnvironmentError, UsageError
from memfit.records import Verification, VerificationVerdict
from memfit.run.options import RunOptions
from memfit.run.parent import ScriptProgress, checked_script_argv
from memfit.strategies.read_plan_or_settings import read_plan_or_settings
from memfit.verification.runs_under_plan import measure_peak_under_plan, verify_plan

_REHEARSAL = "memfit's ghost stands in for the GPU, as in a rehearsal, and the ghost computes no gradients."


def verify(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    plan: str | Path,
    module: bool = False,
    on_progress: Callable[[ScriptProgress], None] = lambda _: None,
) -> Verification:
    """Return whether a script's first update under a plan has the gradients that the plan promises.

    The unmodified script runs until its first update, as written and under the plan, on this machine's GPU.
    Where there is none, the CPU stands in for the CUDA devices that the script names. Its output is hidden.
    On a GPU, memfit then trains three steps under the plan, and measures their peak.
    Gradients are compared before they are clipped. If they differ by more than the plan promises, the script
    runs once more as written.

    Args:
        script: path of the script, or a module's name with ``module=True``.
        arguments: the script's own arguments. A smaller model or shorter sequences are verified sooner.
        plan: the file that ``memfit plan -o`` wrote, or a file of settings, as for ``memfit.configure``.
        module: run a module as ``python -m`` does.
        on_progress: called before each run.

    Raises:
        MemfitError: the script or the plan does not exist, the plan shards the model, or the script makes no
            update.

    >>> found = verify("train.py", ["--context", "128"], plan="plan.json")  # doctest: +SKIP
    >>> found.verdict, found.planned.largest  # doctest: +SKIP
    ('verified', 0.0)
    """
    change = read_plan_or_settings(Path(plan))
    if change.is_sharded:
        raise UsageError(f"{plan} shards the model over several GPUs; memfit verify runs one process.")
    if change.world_size > 1:
        raise UsageError(
            f"{plan} was made for {change.world_size} ranks; memfit verify runs one process. Compare the "
            "gradients of a run of your own under torchrun, with memfit.apply and without."
        )
    command = checked_script_argv(script, arguments, RunOptions(module=module), None)
    try:
        card = detect_card(f"verify {command[0]}")
    except UnsuitableEnvironmentError:
        card = None
    found = verify_plan(command, change, module=module, on_cpu=card is None, on_progress=on_progress)
    if card is not None and card.rehearsal:
        found = replace(found, verdict=VerificationVerdict.NOT_COMPARABLE, reason=_REHEARSAL, peaks=None)
    elif card is None or found.verdict is not VerificationVerdict.VERIFIED:
        return found
    peak = measure_peak_under_plan(command, change, module=module, on_progress=on_progress)
    return replace(found, measured=peak)
