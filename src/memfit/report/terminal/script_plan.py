"""A plan for a script, on the terminal: what it needs and costs, and how to train with it."""

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memfit.records import Equality, PlanRun, ScriptPlan
from memfit.records.command_as_typed import is_job_command
from memfit.records.own_sharding import call_options_in_words
from memfit.report.escape_control_characters import escaped
from memfit.report.terminal.layout import plain_table, subject_in_words
from memfit.report.terminal.plan_chart import plan_chart_lines
from memfit.report.terminal.plan_instructions import (
    code_before_sharding,
    launch_instruction,
    optimizer_changes_in_words,
    own_sharding_instruction,
    sharded_optimizer_code,
    sharding_name,
)
from memfit.report.terminal.plan_words import plan_changes_in_words, precision_in_words, slices_in_words
from memfit.report.terminal.verdict import VerdictLines
from memfit.units import format_bytes, format_gib, format_seconds

_MUCH = 0.05
"""Share of a peak from which log-probabilities are named."""
_LISTED = 6
"""Kept results of a region that are listed one by one."""
_EQUAL = {
    Equality.BITWISE: "The same results, bit for bit.",
    Equality.ROUNDING: "The same results up to rounding, because sums are taken in another order (--bitwise "
    "keeps it).",
    Equality.OTHER: "Other numerics, as --allow permits: training in lower precision gives other results.",
}

_OTHER_KERNELS = (
    "The same results up to rounding, because torch.compile makes other kernels: they round at other places."
)


def print_plan(result: ScriptPlan, console: Console, file: Path | None = None) -> None:
    """Print what a plan needs and costs, and what it changes."""
    subject = subject_in_words(result.command, result.device.name, versions=result.versions)
    console.print(plan_verdict(result).text)
    console.print(Text(f"{subject} · budget {format_gib(result.budget)}", style="dim"))
    console.print()
    console.print(_table(result))
    if result.policies:
        console.print()
    for line in [*(plan_chart_lines(result) if result.policies else ()), *plan_detail_lines(result, file)]:
        console.print(line)


def _divided_batches(chosen: PlanRun) -> Iterator[str]:
    """Say what divides batches: slices, or what to change in the script."""
    for slices in slices_in_words(chosen):
        yield f"Each batch in {slices}, inside the model's call: the training loop stays as it is."
    divided = chosen.change.micro_batches
    if divided is None:
        return
    where = f"    # {escaped(divided.where)}" if divided.where else ""
    yield f"{divided.count} micro-batches of {divided.size} instead of each batch:"
    if divided.by_engine:
        yield "    memfit.Engine divides the batches that it is given."
    else:
        yield f"    {escaped(divided.how)}{where}"
        for line in divided.in_loop:
            yield f"    {escaped(line)}"
        yield "    Assumed: the loss is a mean, and each micro-batch counts alike in it."


def plan_verdict(result: ScriptPlan) -> VerdictLines:
    """Return the answer."""
    written = format_gib(result.as_written.needs.bytes)
    budget = format_gib(result.budget)
    if result.world_size > 1:
        budget += f" on each of {result.world_size:,} GPUs"
    before = "with DDP" if result.sharded else "as written"
    tight = ", TIGHT" * result.is_tight
    if result.chosen is not None and not result.chosen.changes:
        may_fail = ": it may not fit" * result.is_tight
        needs = f"as written, the script needs {written} of {budget}{may_fail}"
        return VerdictLines(f"NO PLAN NEEDED{tight}", (needs,))
    if result.chosen is result.as_written:
        return VerdictLines(f"PLAN FOUND{tight}", (f"needs {written} of {budget}, {before}",))
    if result.chosen is not None:
        needs = f"needs {format_gib(result.chosen.needs.bytes)} of {budget} instead of {written}"
        seconds = f", about {format_seconds(result.seconds)}" if result.seconds else ""
        return VerdictLines(
            f"PLAN FOUND{tight}", (f"{needs}; a step takes {result.chosen.time:.2f} times as long{seconds}",)
        )
    word, why = _no_plan(result, written, budget, before)
    return VerdictLines(word, (why,))


def _no_plan(result: ScriptPlan, written: str, budget: str, before: str) -> tuple[str, str]:
    if result.too_slow is not None and result.max_slowdown is not None:
        needs = format_gib(result.too_slow.needs.bytes)
        return "NO PLAN FITS", (
            f"within {result.max_slowdown:g} times the time; one that needs {needs} of "
            f"{budget} instead of {written} takes {result.too_slow.time:.3f}"
        )
    if result.out_of_time:
        smallest = format_gib((result.smallest or result.as_written).needs.bytes)
        return (
            "NO PLAN FOUND IN TIME",
            f"the smallest so far needs {smallest} of {budget}; {before} {written}",
        )
    if result.floor is not None:
        least = format_gib(result.floor.bytes)
        return "NO PLAN FITS", f"every plan needs at least {least} of {budget}; {before} {written}"
    if result.smallest is not None:
        needs = format_gib(result.smallest.needs.bytes)
        return "NO PLAN FITS", f"the smallest needs {needs} of {budget}; {before} {written}"
    return "NO PLAN", f"{before}, the script needs {written} of {budget}"


def _table(result: ScriptPlan) -> Table:
    several = result.world_size > 1
    kinds = "lrrrw" if several else "lrrw"
    table = plain_table(kinds, "plan", "needs", "time", *["rank"] * several, "peak in")
    runs = (result.as_written, *result.tried)
    words = list(map(plan_changes_in_words, runs))
    for run, short in zip(runs, words, strict=True):
        changes = plan_changes_in_words(run, names_modules=words.count(short) > 1)
        mark = "  <- chosen" if run is result.chosen and run.changes else ""
        mark = "  <- too slow" if run is result.too_slow else mark
        place = (run.place.phase, escaped(run.place.module))
        table.add_row(
            f"{changes}{mark}",
            f"{format_gib(run.needs.bytes)} {run.needs.provenance}",
            f"{run.time:.3f}x",
            *[f"{run.rank}"] * several,
            " · ".join(part for part in place if part),
        )
    return table


def plan_detail_lines(result: ScriptPlan, file: Path | None = None) -> Iterator[str]:
    """Yield what to change in the script, and what else there is to say about the answer."""
    chosen = result.chosen
    if result.world_size > 1:
        yield from _ranks(result)
    if result.reason:
        yield f"\n{escaped(result.reason)}"
    if result.undivided and (chosen is None or chosen.changes):
        divided = any(run.change.micro_batches is not None for run in result.tried)
        so_far = "divided no further" if divided else "not divided into micro-batches"
        yield f"\nBatches are {so_far}: {escaped(result.undivided.removesuffix('.'))}."
    if result.log_probabilities >= _MUCH * result.as_written.needs.bytes and (
        chosen is None or chosen.changes
    ):
        yield (
            f"\nThe log-probabilities of the loss take {format_gib(result.log_probabilities)} as written, "
            "and the logits and their gradient as much each. memfit.ChunkedHead in the model makes them "
            "slice by slice."
        )
    if result.may_fit_as_written:
        least = format_gib(result.without_workspaces)
        yield (
            f"\nOn the smallest GPU, the script as written needs {least} without the workspaces of "
            "convolutions. Where memory is short, PyTorch takes engines with smaller ones, which may round "
            "differently: it may fit without a plan. memfit dry-run --memory tells."
        )
    if result.dropped:
        count = len(result.dropped)
        yield f"\n{count} plan{'s' * (count != 1)} could not be run. {escaped(result.dropped[0])}"
    if result.too_slow is not None:
        yield f"\nTimes are assumed: {result.rule}."
        yield "Marked as too slow: the fastest plan found that fits. A higher --max-slowdown permits it."
    if chosen is not None and result.is_tight:
        yield _tight(result, chosen)
    if chosen is not None and chosen.changes:
        yield from _chosen(result, chosen, file)


def _tight(result: ScriptPlan, chosen: PlanRun) -> str:
    """Say why a plan may not fit."""
    sure = result.budget - result.uncertainty
    none = bool(result.tried) and all(run.needs.bytes > sure for run in result.tried)
    return (
        f"\nTight: it leaves {format_gib(result.budget - chosen.needs.bytes)}, and the size of the CUDA "
        f"context is assumed. The real size may be up to {format_bytes(result.uncertainty)} larger"
        f"{'; none of the plans that ran leaves that much' * none}. To measure it on your GPU, run "
        "memfit doctor --context."
    )


def _ranks(result: ScriptPlan) -> Iterator[str]:
    """Say what the figures are of."""
    if result.sharded:
        yield "\nThe figures are of the rank that needs most. The ranks share each batch of the script's."
        return
    yield "\nThe figures are of the rank that needs most."
    if result.ran < result.world_size:
        yield (
            f"As written, memfit ran {result.ran:,} of the {result.world_size:,} ranks; it assumed that the "
            "others hold what the ranks on the same GPU of machines before and after them hold."
        )
    yield "Of ranks whose allocations were alike as written, one ran under each plan."


def _chosen(result: ScriptPlan, chosen: PlanRun, file: Path | None) -> Iterator[str]:
    other_kernels = chosen.compiled and chosen.equality is Equality.ROUNDING
    equal = _OTHER_KERNELS if other_kernels else _EQUAL[chosen.equality]
    if (
        chosen.change.micro_batches is not None
        and chosen.change.micro_batches.assumed
        and chosen.equality is Equality.ROUNDING
    ):
        equal = f"Assumed: the same results up to rounding, {chosen.change.micro_batches.assumed}."
    if not result.sharded:
        yield f"\n{equal}"
    elif chosen is not result.as_written:
        yield f"\nCompared with DDP on {result.world_size:,} GPUs: {equal[0].lower()}{equal[1:]}"
    for own in result.sharding_calls:
        if options := chosen.change.own_sharding.get(own.call):
            text = own_sharding_instruction(own, call_options_in_words(options))
            yield f"{own.name}: {text}"
    yield from _changes(chosen)
    if _draws_others(result, chosen):
        yield "Random numbers, such as those of dropout, are others than for the whole batch."
    if result.out_of_time:
        yield "The time for the search was over before it ended: there may be a faster plan."
    yield from _times(result, chosen)
    if result.sent is not None:
        before, now = map(format_gib, result.sent)
        against = "" if chosen is result.as_written else f", with DDP {before}"
        left_out = "; the time leaves that out" * (result.step_time is None)
        yield f"Each GPU sends about {now} a step{against} (assumed: rings of NCCL{left_out})."
    yield from _how_to_train(result, chosen, file)


def _draws_others(result: ScriptPlan, chosen: PlanRun) -> bool:
    sliced = result.in_loop if "batch_slices" in chosen.change.plan else None
    divided = (sliced or chosen).change.micro_batches
    return divided is not None and divided.draws


def _times(result: ScriptPlan, chosen: PlanRun) -> Iterator[str]:
    """Say how long a step takes under a plan, and what would make it faster."""
    if chosen.time > 1 or chosen.change.plan:
        apart = ", tight ones apart," * (result.uncertainty > 0 and not result.is_tight)
        bound = (
            f"; no plan that memfit weighed{apart} takes less than {result.bound:.3f}" if result.bound else ""
        )
        than = "DDP" if result.sharded else "the script as written"
        yield f"Time: {chosen.time:.3f} times {than}{bound} (assumed: {result.rule})."
    if result.in_loop is not None and result.in_loop.time < chosen.time:
        changes = plan_changes_in_words(result.in_loop)
        rest = f": {changes}. Change the loop, and plan again for the rest" if "," in changes else ""
        yield f"With changes of the training loop instead, {result.in_loop.time:.3f} times{rest}:"
        yield from _divided_batches(result.in_loop)


def _how_to_train(result: ScriptPlan, chosen: PlanRun, file: Path | None) -> Iterator[str]:
    saved = ", saved with -o plan.json" * (file is None)
    name = str(file or "plan.json")
    quoted = escaped(json.dumps(name, ensure_ascii=False))
    if _trains(result, chosen):
        by_hand = chosen.change.micro_batches is not None and not chosen.change.micro_batches.by_option
        what = ", micro-batches apart" * by_hand
        yield f"To train with it{saved}, the script as it is{what}:"
        saved = ""
        launcher = f"torchrun --nproc-per-node {result.nproc} -m " * (result.world_size > 1)
        yield f"    {launcher}memfit train --plan {escaped(shlex.join([name, *result.command]))}"
    if is_job_command(result.command):
        function = escaped(result.command[1].rpartition(":")[2])
        how = f"engine = memfit.Engine({function}(), {quoted})  # engine.fit(loader), engine.step(batch)"
    elif result.models:
        models = escaped(", ".join(result.models))
        how = f"memfit.apply(model, {quoted})  # before the optimizer is created: {models}"
        if result.sharded:
            how = f"model = {how}"
        elif "optimizer_state" in chosen.change.plan:
            how = f"memfit.apply(model, {quoted}, optimizer=optimizer)  # before its first step: {models}"
    else:  # it is applied, or changes no model
        return
    yield f"To train with it in the script{saved}, write:"
    if result.sharded:
        yield from code_before_sharding()
    yield f"    {how}"
    if result.sharded and chosen.change.plan["sharding"]["mode"] == "zero1":
        yield sharded_optimizer_code("")
    if result.sharded:
        yield launch_instruction(result.nproc)


def _trains(result: ScriptPlan, chosen: PlanRun) -> bool:
    """Return whether ``memfit train`` carries out any of a plan."""
    if is_job_command(result.command):
        return False
    by_option = chosen.change.micro_batches is not None and chosen.change.micro_batches.by_option
    own = chosen.change.plan.keys() - {"accumulation"}
    return bool(
        own or by_option or chosen.change.fused or chosen.change.allocator or chosen.change.own_sharding
    )


def _how(region: Mapping[str, Any]) -> Iterator[str]:
    """Say how a region is recomputed."""
    if region.get("recompute") == "tensors":
        yield "tensor by tensor"
    kept = list(map(escaped, region.get("save_ops", ())))
    if len(kept) > _LISTED:  # the plan file has them one by one
        counted = Counter(name.partition(":")[0] for name in kept)
        kept = [f"{len(kept)} results: " + ", ".join(f"{count} of {name}" for name, count in counted.items())]
    if kept:
        yield f"keeping {', '.join(kept)}"
    if region.get("split_at"):
        yield f"in parts that begin at {', '.join(map(escaped, region['split_at']))}"


def _changes(chosen: PlanRun) -> Iterator[str]:
    """Say what a plan changes."""
    if "sharding" in chosen.change.plan:
        settings = chosen.change.plan["sharding"]
        given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        yield f"{sharding_name(settings)}: memfit.Sharding({given})."
    if "precision" in chosen.change.plan:
        yield f"Precision: {precision_in_words(chosen)}."
    yield from _divided_batches(chosen)
    for _, sentence in optimizer_changes_in_words(chosen.change.plan.get("optimizer_state", {})):
        yield sentence
    if chosen.change.fused:
        yield "Write fused=True where the optimizer is created."
    if chosen.change.allocator:
        yield f"Before the script starts: export PYTORCH_ALLOC_CONF={escaped(chosen.change.allocator)}"
    if "compilation" in chosen.change.plan:
        share = chosen.change.plan["compilation"]["activation_memory_budget"]
        yield "Compiled graphs keep less. memfit.apply sets, before the first call of what is compiled:"
        yield f"    torch._functorch.config.activation_memory_budget = {share:g}"
    if "checkpointing" in chosen.change.plan and "regions" not in chosen.change.plan["checkpointing"]:
        yield "Recomputed in the backward: every block that the model repeats."
    elif "checkpointing" in chosen.change.plan:
        inputs = ", from inputs that wait on the host" * ("offload" in chosen.change.plan)
        yield f"Recomputed in the backward{inputs}:"
        for region in chosen.change.plan["checkpointing"]["regions"]:
            names = ", ".join(escaped(name) or "the whole model" for name in region["modules"])
            yield "  ".join((f"    {names}", *_how(region)))
