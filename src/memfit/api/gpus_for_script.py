"""Which GPUs run a script: a plan for each, from runs that GPUs of one compute capability share."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

from memfit.analysis.trial_result import TrialResult
from memfit.devices import Device, all_devices, find_device
from memfit.errors import TargetError, UsageError
from memfit.ghost.build.torch_install import find_torch
from memfit.planning.find_plan import find_plan
from memfit.planning.run_changes_on_ghost import (
    RULE,
    PlannedScript,
    host_copy_time_estimator,
    kernel_time_estimator,
)
from memfit.planning.strategy_and_allocator_changes import AllowedChanges
from memfit.records import Change, DeviceUse, GpusFor, ScriptEnd, ScriptPlan
from memfit.run.options import STEPS, RunOptions
from memfit.run.parent import ScriptProgress, checked_script_argv
from memfit.run.resolve_ghost_settings import resolve_ghost_settings
from memfit.trials.script_standbys import ScriptStandbys
from memfit.trials.trial_run import trial_runner


def gpus_for(  # noqa: PLR0913 - one parameter an option
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    in_use: int = 0,
    steps: int = STEPS,
    values: str = "",
    bitwise: bool = False,
    steps_total: int | None = None,
    prices: Mapping[str, float] | None = None,
    priced_on: str = "",
    on_progress: Callable[[ScriptProgress], None] = lambda _: None,
) -> GpusFor:
    """Return which GPUs of the table (``memfit gpus``) run an unmodified script, as written or under a plan.

    The arguments are those of ``memfit.plan``; ``prices`` has what an hour of some GPUs costs, and
    ``priced_on`` the date of these prices. ``steps_total`` are the training steps of the whole run, for its
    hours and costs. GPUs of one compute capability share the runs of the script, which asks each for the same
    memory. If it reads the size of the GPU, it gets that of the largest.

    Raises:
        UsageError: ``steps_total`` is less than 1.
        UnknownDeviceError: a price is of no GPU of the table.
        MemfitError: the script does not exist, this PyTorch or platform is not supported, or the script as
            written cannot be run on any GPU.

    >>> found = gpus_for("train.py", ["--batch-size", "8"])  # doctest: +SKIP
    >>> [plan.device.name for plan in found.plans if plan.chosen is plan.as_written][:2]  # doctest: +SKIP
    ['RTX 3060', 'RTX 4070']
    """
    if steps_total is not None and steps_total < 1:
        raise UsageError(f"steps_total must be at least 1, not {steps_total}.")
    priced = {find_device(name).name: price for name, price in (prices or {}).items()}
    options = RunOptions(module=module, steps=steps, in_use=in_use, values=values)
    allowed = AllowedChanges(rounding=not bitwise)
    command = checked_script_argv(script, arguments, options, None)
    alike: dict[tuple[int, int], list[Device]] = defaultdict(list)
    for card in sorted(all_devices(), key=lambda card: -card.total_bytes):
        alike[card.compute_capability].append(card)
    plans: list[ScriptPlan] = []
    failed: dict[str, TargetError] = {}
    for number, cards in enumerate(alike.values(), 1):
        names = f"{cards[0].name} ({number} of {len(alike)} kinds of GPUs)"

        def show(progress: ScriptProgress, names: str = names) -> None:
            on_progress(replace(progress, trying=f"{names}: {progress.trying}"))

        try:
            plans += _plans(command, cards, options, allowed, show)
        except TargetError as error:
            failed.update((card.name, error) for card in cards)
    if not plans:
        raise next(iter(failed.values()))
    reasons = {name: str(error) for name, error in failed.items()}
    found = GpusFor(tuple(plans), reasons, command, plans[0].versions, priced, priced_on, steps_total)
    costs = found.costs
    plans.sort(key=lambda plan: (costs.get(plan.device.name, inf), plan.device.total.bytes))
    return replace(found, plans=tuple(plans))


def _plans(
    command: tuple[str, ...],
    cards: Sequence[Device],
    options: RunOptions,
    allowed: AllowedChanges,
    on_progress: Callable[[ScriptProgress], None],
) -> list[ScriptPlan]:
    """Return a plan for each of several GPUs of one compute capability; the largest must come first."""
    largest = replace(options, gpu=cards[0].name, unlimited=True)
    plans: list[ScriptPlan] = []
    done: dict[Change, TrialResult | ScriptEnd] = {}
    with ScriptStandbys() as standbys:
        run = trial_runner(command, largest, on_progress, standbys=standbys)

        def run_on(device: DeviceUse, change: Change, what: str) -> TrialResult | ScriptEnd:
            """Run the script once under each change; the trace has what a GPU holds outside the allocator."""
            if change not in done:
                done[change] = run(change, what)
            result = done[change]
            if isinstance(result, ScriptEnd):
                return result
            own = replace(device, total=result.trace.device.total, nccl=result.trace.device.nccl)
            return replace(result, trace=replace(result.trace, device=own))

        for card in cards:
            device = resolve_ghost_settings(replace(options, gpu=card.name)).device
            times = kernel_time_estimator(card, find_torch().version), host_copy_time_estimator(card)
            planned = PlannedScript(partial(run_on, device), *times, RULE)
            plan = find_plan(planned, device.total.bytes - options.in_use, allowed)
            plans.append(replace(plan, device=device))
    return plans
