"""Which advice is given: what is enough first, with the fewest changes, then the cheapest."""

from dataclasses import replace

import pytest

from memfit.analysis.allocator_comparison import compare_allocator_settings
from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.analysis.total_need_by_rerun import find_total_need
from memfit.analysis.trial_result import TrialResult
from memfit.cli.command_output import exit_code_of_run
from memfit.planning.advice import find_advice
from memfit.records import (
    Action,
    Category,
    Change,
    JobRank,
    Mark,
    MarkKind,
    Provenance,
    ScriptEnd,
)
from memfit.report.terminal.advice import advice_heading
from support.advised_runs import (
    BF16,
    CHECKPOINT,
    CONTEXT,
    FAILED,
    MIB,
    OFFLOAD,
    STEPS,
    advice_for,
    device,
    in_words,
    rows,
    too_large,
    trace,
)
from support.traces import BASE, Event, freed, trace_of


def in_use(run, mib):
    """Return a run on a device on which other processes use some memory, given in MiB."""
    return replace(run, device=replace(run.device, in_use=mib * MIB))


def test_each_saving_is_relative_to_the_unchanged_run():
    answer, tried = advice_for(trace(400), {"checkpointing": 300, "offload": 50})
    assert rows(answer) == [(CHECKPOINT, 100, 400, True), (OFFLOAD, 350, 150, True)]
    assert tried == ["checkpointing", "offload"]
    assert (answer.needs.bytes, answer.untried) == (500 * MIB, None)


def test_a_change_that_is_enough_comes_before_and_instead_of_one_that_is_not():
    """The fused optimizer costs least, but saves too little."""
    results = {"": 400, "fused": 380, "checkpointing": 240, "offload": 390}
    answer, _ = advice_for(too_large(450, phase=1), results, phase=1)
    assert rows(answer) == [(CHECKPOINT, 160, 340, True)]


def test_a_fit_that_rests_on_an_assumption_is_not_enough():
    """An assumed context of 100 MiB may take 20 MiB more. A tight run gets advice as well."""
    results = {"": 400, "checkpointing": 200, "offload": 100}
    answer, _ = advice_for(too_large(310, CONTEXT), results)
    assert rows(answer) == [(OFFLOAD, 300, 200, True)]
    answer, _ = advice_for(trace(400, total=510), {"checkpointing": 395, "offload": 300})
    assert answer.verdict == "tight"
    assert rows(answer) == [(OFFLOAD, 100, 400, True)]


def test_what_other_processes_use_is_not_free():
    results = {"": 400, "checkpointing": 300, "offload": 100}
    answer, _ = advice_for(in_use(too_large(450), 100), results)
    assert rows(answer) == [(OFFLOAD, 300, 200, True)]


def test_what_a_run_caches_does_not_make_it_tight():
    """PyTorch releases the cache where memory is short. What it cannot release counts."""
    results = {"checkpointing": trace(300, cached=100, total=510), "offload": FAILED}
    answer, _ = advice_for(trace(400, total=510), results)
    assert rows(answer) == [(CHECKPOINT, 100, 400, True)]
    results["checkpointing"] = trace(296, cached=100, fragmented=True, total=510)
    answer, _ = advice_for(trace(400, total=510), results)
    assert answer.advice == ()


def test_a_plan_of_the_scripts_own_is_to_be_extended():
    """As with memfit.Engine: memfit refuses a second plan for a model."""

    def run(_change, _what):
        return TrialResult(trace(300), ("Net (plan: train.py:12)",))

    answer = find_advice(trace(400), dry_run_of_trace(trace(400)), run)
    assert answer.advice[0].how == ("add memfit.Checkpointing() to the plan of Net (plan: train.py:12)",)


def test_offloading_is_tried_with_copies_that_finish_late():
    """As in a plan: the copies may hold memory until then."""
    late = []

    def run(change, _what):
        late.extend([in_words(change)] * change.finish_late)
        return TrialResult(trace(250 if change.finish_late else 300), ("Net",))

    answer = find_advice(trace(400), dry_run_of_trace(trace(400)), run)
    assert rows(answer) == [(CHECKPOINT, 100, 400, True), (OFFLOAD, 150, 350, True)]
    assert late == ["offload"]


def test_a_plan_is_recommended_where_one_process_does_not_fit():
    results = {"": 400, "checkpointing": 300, "offload": FAILED}
    answer, _ = advice_for(too_large(450), results)
    assert answer.advice_remarks[-1].startswith("memfit plan, given --gpu or --budget, finds the fastest mix")
    assert advice_for(trace(400), results)[0].advice_remarks == ()  # it fits
    rank = replace(dry_run_of_trace(too_large(450)), rank=JobRank(0, 8))
    answer = find_advice(too_large(450), rank, lambda *_: TrialResult(trace(400), ("Net",)))
    assert not any("memfit plan" in line for line in answer.advice_remarks)


def test_of_changes_that_are_enough_the_cheapest_comes_first():
    results = {"": 400, "fused": 340, "checkpointing": 300, "offload": 100}
    answer, _ = advice_for(too_large(450, phase=1), results, phase=1)
    assert rows(answer) == [
        ("fused optimizer", 60, 440, True),
        (CHECKPOINT, 100, 400, True),
        (OFFLOAD, 300, 200, True),
    ]


def test_a_combination_is_offered_only_if_no_single_change_is_enough():
    results = {"": 400, "checkpointing": 300, "offload": 310, "checkpointing offload": 200}
    answer, tried = advice_for(too_large(350), results)
    assert rows(answer) == [(f"{CHECKPOINT} + {OFFLOAD}", 200, 300, True)]
    (how,) = answer.advice[0].how
    assert how == (
        "import memfit; memfit.apply(model, [memfit.Checkpointing(), memfit.Offload()])  # after creating Net"
    )
    assert tried[-1] == "checkpointing offload"
    answer, _ = advice_for(too_large(420), results)
    assert rows(answer) == [(CHECKPOINT, 100, 400, True), (OFFLOAD, 90, 410, True)]


def test_a_change_that_a_combination_does_not_need_is_dropped():
    """The fused optimizer saves most on its own, and nothing beside checkpointing and offloading."""
    bf16 = "--mixed_precision bf16"
    results = {
        "": 400, "fused": 300, "checkpointing": 310, "offload": 320, bf16: 330,
        "checkpointing fused": 290, "offload fused": 295, f"fused {bf16}": 296,
        f"checkpointing fused {bf16}": 240, f"checkpointing {bf16}": 280,
        "checkpointing offload fused": 245, "checkpointing offload": 245,
    }  # fmt: skip
    own = {"options": [BF16], "phase": 1}
    answer, _ = advice_for(too_large(350, **own), results, **own)
    assert [piece.changes for piece in answer.advice] == [  # the smaller set first
        (CHECKPOINT, OFFLOAD),
        ("fused optimizer", CHECKPOINT, "bf16"),
    ]


def test_of_one_kind_only_one_change_is_made():
    """Having chosen bf16, the script is not run with fp16 as well."""
    own = {"options": [BF16, replace(BF16, words=("--fp16",))]}
    results = {"": 400, "--mixed_precision bf16": 300, "checkpointing": FAILED, "offload": FAILED}
    together = {f"{one} --mixed_precision bf16": FAILED for one in ("checkpointing", "offload")}
    answer, _ = advice_for(too_large(200, **own), results | together, **own)
    assert rows(answer) == [("bf16", 100, 400, False)]


def test_of_two_changes_that_save_about_as_much_a_combination_has_the_cheaper():
    results = {"": 400, "checkpointing": 305, "offload": 300, "--bf16": 390}
    together = {"checkpointing offload": 298, "checkpointing --bf16": 250}
    own = {"options": [replace(BF16, words=("--bf16",))]}
    answer, _ = advice_for(too_large(350, **own), results | together, **own)
    assert rows(answer) == [(f"{CHECKPOINT} + bf16", 150, 350, True)]


def test_if_nothing_is_enough_what_saves_most_comes_first():
    results = {"": 400, "checkpointing": 300, "offload": 350, "checkpointing offload": 280}
    answer, _ = advice_for(too_large(200), results)
    assert rows(answer) == [
        (f"{CHECKPOINT} + {OFFLOAD}", 120, 380, False),
        (CHECKPOINT, 100, 400, False),
        (OFFLOAD, 50, 450, False),
    ]


def test_advice_names_the_models_it_applies_to():
    results = iter((TrialResult(trace(300), ("Net",)), TrialResult(trace(100), ("Net", "Net"))))
    first = trace(400)
    answer = find_advice(first, dry_run_of_trace(first), lambda *_: next(results))
    assert [piece.how for piece in answer.advice] == [
        ("import memfit; memfit.apply(model, [memfit.Checkpointing()])  # after creating Net",),
        ("import memfit; memfit.apply(model, [memfit.Offload()])  # after creating each of Net, Net",),
    ]


def test_changes_that_save_under_one_percent_or_fail_are_skipped():
    answer, _ = advice_for(trace(400), {"checkpointing": 396, "offload": 390})
    assert rows(answer) == [(OFFLOAD, 10, 490, True)]
    answer, _ = advice_for(trace(400), {"checkpointing": FAILED, "offload": ScriptEnd("end", 3)})
    assert (answer.advice, answer.untried) == ((), FAILED)


def test_a_peak_in_the_optimizer_suggests_a_fused_one():
    temporaries = {"phase": 1, "category": Category.TEMPORARY}
    answer, tried = advice_for(trace(400, **temporaries), {"fused": 200}, **temporaries)
    assert rows(answer) == [("fused optimizer", 200, 300, True)]
    assert tried == ["fused"]


PARAMETERS = {"category": Category.PARAMETER}


def test_settings_are_replayed_not_run():
    """Expandable segments reuse the cached memory. Settings already in force stay."""
    answer, tried = advice_for(
        trace(400, cached=300, fragmented=True, conf="max_split_size_mb:512", **PARAMETERS), {}
    )
    assert rows(answer) == [("expandable segments", 280, 520, True)]
    assert answer.advice[0].how == ("PYTORCH_ALLOC_CONF=max_split_size_mb:512,expandable_segments:True",)
    assert tried == []


def test_settings_already_in_force_are_not_advised():
    first = trace(400, cached=300, fragmented=True, conf="expandable_segments:True", **PARAMETERS)
    assert advice_for(first, {})[0].advice == ()


def test_the_cost_of_settings_is_that_of_their_driver_calls():
    """A script that empties its cache each step maps its segments again each step."""
    history, marks = [], []
    blocks = [(BASE, 300 * MIB), (BASE + (1 << 40), 400 * MIB)]
    for step in range(3):
        for block in blocks:
            history += [Event(Action.SEGMENT_ALLOC, *block), Event(Action.ALLOC, *block), *freed(*block)]
            history += [Event(Action.ALLOC, block[0], 2 * MIB)]  # the rest cannot be released
        for address, _ in blocks:
            history += freed(address, 2 * MIB)
        history += [Event(Action.SEGMENT_FREE, *block) for block in blocks]
        marks.append(Mark(len(history), MarkKind.TRAINING_STEP, step))
    first = trace_of(history, marks=tuple(marks), device=device(80 << 10), end=STEPS)
    before, after = (
        row.seconds_per_step for row in compare_allocator_settings(first, "expandable_segments:True").outcomes
    )
    assert after - before > 0.5e-3
    (piece,) = advice_for(first, {})[0].advice
    assert piece.costs == f"{1000 * (after - before):.1f} ms per step (assumed) in driver calls"
    answer, _ = advice_for(trace(400, cached=300, fragmented=True, **PARAMETERS), {})
    assert answer.advice[0].costs == "an unknown amount of time: fewer than two steps completed"


def test_at_most_three_pieces_of_advice():
    """Four changes would help; the last would be offloading."""
    answer, tried = advice_for(
        trace(800, cached=300, fragmented=True, phase=1), {"fused": 700, "checkpointing": 600}
    )
    assert [piece.changes for piece in answer.advice] == [
        ("expandable segments",),
        ("fused optimizer",),
        (CHECKPOINT,),
    ]
    assert tried == ["fused", "checkpointing"]


def test_the_next_change_targets_the_remaining_peak():
    """Once the optimizer is fused, no activations are left at the peak."""
    none = trace(300, category=Category.PARAMETER)
    results = {"": trace(400, phase=1), "fused": none, "checkpointing": 390, "offload": 390}
    answer, tried = advice_for(too_large(200), results)
    assert answer.advice[0].changes == ("fused optimizer",)
    assert tried == ["", "fused", "checkpointing", "offload"]


@pytest.mark.parametrize(
    "end", [ScriptEnd("exception", 1), ScriptEnd("interrupted", 130), ScriptEnd("end", 3)]
)
def test_an_interrupted_run_gets_no_advice_and_is_not_rerun(end):
    answer, tried = advice_for(trace(400, end=end), {})
    assert (answer.advice, answer.needs, answer.untried, tried) == ((), None, end, [])


def test_an_interrupted_run_that_does_not_fit_is_not_rerun_either():
    found = dry_run_of_trace(trace(200, oom=True, end=ScriptEnd("interrupted", 130), total=300))
    assert found.verdict == "does not fit"
    assert find_total_need(found, None) is found


@pytest.mark.parametrize("end", [STEPS, ScriptEnd("out of memory", 1)])
def test_a_run_out_of_memory_is_first_rerun_with_unlimited_memory(end):
    """Even if the script caught the exception: it may have done less since."""
    short = trace(200, oom=True, end=end, total=380)
    answer, tried = advice_for(short, {"": 400, "checkpointing": 150, "offload": 400})
    assert rows(answer) == [(CHECKPOINT, 250, 250, True)]
    assert tried[0] == in_words(Change())
    assert answer.needs.bytes == 500 * MIB
    assert (answer.verdict, answer.peak_reserved) == (dry_run_of_trace(short).verdict, 200 * MIB)
    answer, _ = advice_for(short, {"": FAILED})
    assert (answer.advice, answer.needs, answer.untried) == ((), None, FAILED)
    assert find_advice(short, dry_run_of_trace(short)).advice == ()


def test_a_request_for_more_than_unlimited_memory_gets_no_advice():
    answer, tried = advice_for(too_large(450), {"": trace(400, oom=True)})
    assert (answer.advice, answer.needs, tried) == ((), None, [""])
    assert "ran out of memory even with" in answer.untried.exception


def test_advice_for_a_script_that_caught_an_error_starts_from_a_run_without_one():
    """After the error, the script may have used smaller batches."""
    answer, tried = advice_for(
        trace(200, total=380), {"": 400, "checkpointing": 150, "offload": 400}, caught=1
    )
    assert tried[0] == in_words(Change())
    assert rows(answer) == [(CHECKPOINT, 250, 250, True)]
    assert advice_heading(answer) == (
        "The script handles its out-of-memory errors. To run without one, it needs 500.0 MiB. This is enough:"
    )


def test_an_interrupt_keeps_the_advice_found_so_far():
    answer, _ = advice_for(trace(400), {"checkpointing": 300, "offload": KeyboardInterrupt})
    assert rows(answer) == [(CHECKPOINT, 100, 400, True)]
    assert answer.untried == ScriptEnd("interrupted", 130)
    assert exit_code_of_run(answer, fail=False) == 130
    assert exit_code_of_run(replace(answer, untried=FAILED), fail=False) == 0


def test_a_trace_that_cannot_be_replayed_gives_the_reason():
    answer, tried = advice_for(trace(400, conf="backend:cudaMallocAsync"), {})
    assert (answer.advice, tried) == ((), [])
    assert "the run used backend:cudaMallocAsync" in answer.untried.exception


def test_figures_carry_their_provenance():
    first = trace(400, cached=300, fragmented=True, total=0)
    (piece,) = find_advice(first, dry_run_of_trace(first)).advice
    assert (piece.saves.provenance, piece.needs.provenance) == (Provenance.SIMULATED, Provenance.ASSUMED)
    assert piece.fits is None
    results = {"checkpointing": trace(200, **PARAMETERS), "offload": FAILED}
    (piece,) = advice_for(trace(400), results)[0].advice
    assert piece.saves.provenance is Provenance.EXACT


def test_what_a_run_needs_is_the_memory_of_the_smallest_gpu_on_which_it_fits():
    """With unlimited memory, the run takes 700 MiB. Where memory is short, PyTorch releases 200 of them."""
    short = too_large(450)
    unlimited = replace(trace(400, cached=200), device=short.device)
    assert dry_run_of_trace(unlimited).peak_process.bytes == 700 * MIB
    answer, _ = advice_for(short, {"": unlimited, "checkpointing": trace(300, cached=200), "offload": FAILED})
    assert rows(answer) == [(CHECKPOINT, 100, 400, True)]
    assert answer.needs.bytes == 500 * MIB
    assert answer.advice[0].saves.provenance is Provenance.SIMULATED
    assert find_total_need(dry_run_of_trace(short), lambda *_: TrialResult(unlimited)).needs == answer.needs


def test_what_a_run_needs_is_never_less_than_the_memory_it_ran_out_of():
    """The replay would fit 500 MiB, but the script itself did not: it may do other things when short."""
    answer, _ = advice_for(too_large(550), {"": 400, "checkpointing": 300, "offload": FAILED})
    assert answer.needs.bytes == 552 * MIB
    assert rows(answer) == [(CHECKPOINT, 152, 400, True)]


def test_what_a_run_takes_on_the_gpu_at_hand_is_seen_not_simulated():
    """Its cache was released in the run, too."""
    first = trace(4000, cached=2, released=True, total=4101)
    answer, _ = advice_for(first, {"checkpointing": trace(200, **PARAMETERS), "offload": FAILED})
    (piece,) = answer.advice
    assert (answer.needs.bytes, piece.saves.bytes) == (4100 * MIB, 3800 * MIB)
    assert piece.saves.provenance is Provenance.EXACT
