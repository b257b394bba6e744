"""What a plan changes, in a few words: the rows of tables."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from memfit.records import PlanRun
from memfit.records.own_sharding import call_options_in_words
from memfit.report.escape_control_characters import escaped
from memfit.report.terminal.plan_chart import policy_name_of_run
from memfit.report.terminal.plan_instructions import optimizer_changes_in_words, sharding_name


def plan_changes_in_words(run: PlanRun, *, names_modules: bool = False) -> str:
    """Return what a plan changes, in a few words.

    Args:
        run: under the plan.
        names_modules: whether it says which modules are recomputed, and how many results these keep.
    """
    divided = run.change.micro_batches
    named = [sharding_name(run.change.plan["sharding"])] if "sharding" in run.change.plan else []
    named += map(call_options_in_words, run.change.own_sharding.values())
    named += [f"{divided.count} micro-batches of {divided.size}"] if divided is not None else []
    named += slices_in_words(run)
    regions = run.change.plan.get("checkpointing", {}).get("regions", [])
    part, split = (
        sum(len(region["modules"]) for region in regions if region.get(name))
        for name in ("save_ops", "split_at")
    )
    full = sum(len(region["modules"]) for region in regions) - part - split
    if any(region.get("recompute") == "tensors" for region in regions):
        part = full = 0
        named.append("recomputed tensor by tensor")
    named += [f"{full} module{'s' * (full != 1)} recomputed"] * bool(full) + [f"{part} in part"] * bool(part)
    named += [f"{split} split"] * bool(split)
    if regions and names_modules:
        named[-1] += f" ({_modules_and_results(regions)})"
    if "checkpointing" in run.change.plan and not regions:
        named.append(policy_name_of_run(run))
    named += [_kept_share(run)] if "compilation" in run.change.plan else []
    named += ["inputs offloaded"] * ("offload" in run.change.plan)
    named += [precision_in_words(run)] if "precision" in run.change.plan else []
    named += [words for words, _ in optimizer_changes_in_words(run.change.plan.get("optimizer_state", {}))]
    named += ["fused optimizer"] * run.change.fused
    named += ["expandable segments"] * bool(run.change.allocator)
    return ", ".join(named) or "as written"


def _modules_and_results(regions: Sequence[Mapping[str, Any]]) -> str:
    """Return the modules of regions, numbers in their paths apart, and how many results these keep."""
    modules = [re.sub(r"\d+", "*", module) for region in regions for module in region["modules"]]
    counted = [f"{count} {escaped(path) or 'model'}" for path, count in Counter(modules).items()]
    kept = sum(len(region["modules"]) * len(region.get("save_ops", ())) for region in regions)
    return ", ".join(counted) + f", {kept} result{'s' * (kept != 1)} kept" * bool(kept)


def precision_in_words(run: PlanRun) -> str:
    """Return the precision of a plan that has one."""
    settings = run.change.plan["precision"]
    return f"{settings['dtype']}{' autocast' if settings.get('autocast', True) else ' parameters'}"


def _kept_share(run: PlanRun) -> str:
    return f"activation_memory_budget {run.change.plan['compilation']['activation_memory_budget']:g}"


def slices_in_words(run: PlanRun) -> list[str]:
    """Return into how many slices a plan divides batches; nothing if it does not."""
    settings = run.change.plan.get("batch_slices", {})
    kept = f", of which {settings['kept']} are kept" if "kept" in settings else ""
    return [f"{settings['count']} slices{kept}"] if settings else []
