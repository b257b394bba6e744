"""Changes to a script: what they are together, and how batches are divided."""

from dataclasses import replace

from memfit.planning.batch_size_changes import (
    batch_division_changes,
    smaller_batch_changes,
    why_batches_are_indivisible,
)
from memfit.planning.choose_checkpointing import CheckpointChoice, RegionSettings
from memfit.planning.strategy_and_allocator_changes import (
    FUSED_OPTIMIZER,
    OFFLOADED_ACTIVATIONS,
    checkpoint_choice_change,
)
from memfit.records import Change, LoaderBatchSize, ScriptOption, ScriptOptionPurpose
from support.advised_runs import trace

LOADER = LoaderBatchSize(12, "train.py:31")
BATCH = ScriptOption(ScriptOptionPurpose.BATCH_SIZE, ("--batch-size",), 12)
ACCUMULATION = ScriptOption(ScriptOptionPurpose.ACCUMULATION, ("--accum",), 2)


def test_changes_made_together_keep_what_each_of_them_says():
    smaller = smaller_batch_changes(trace(1, loader=LOADER))[0]
    both = FUSED_OPTIMIZER | smaller | OFFLOADED_ACTIVATIONS
    assert (both.fused, both.loader) == (True, replace(LOADER, size=6))
    assert both.plan == {"offload": {}}
    assert (both.where, both.batch_size, both.uses_side_streams, both.parts) == ("train.py:31", 6, True, 1)
    assert both.words == ("fused optimizer", "batch size 6 instead of 12", "offload activations")
    assert both.how == (*FUSED_OPTIMIZER.how, "DataLoader(batch_size=6), now 12")
    assert both.costs == (
        "no time, but results may differ in their last bits; each update sees 6 samples instead of 12; host "
        "memory, and copies to the host and back"
    )
    assert both | Change() == both


def test_batches_are_halved_and_divided_where_the_parts_are_equal():
    found = trace(1, loader=LOADER)
    assert [each.batch_size for each in smaller_batch_changes(found)] == [6, 3, 1]
    assert [(each.parts, each.batch_size) for each in batch_division_changes(found, draws=True)] == [
        (2, 6),
        (4, 3),
        (12, 1),
    ]
    assert all(each.micro_batches.draws for each in batch_division_changes(found, draws=True))
    odd = trace(1, loader=replace(LOADER, size=5))
    assert [each.batch_size for each in smaller_batch_changes(odd)] == [2, 1]
    assert [(each.parts, each.batch_size) for each in batch_division_changes(odd, draws=False)] == [(5, 1)]


def test_what_sums_the_gradients_of_the_parts_is_memfit_or_the_scripts_own_option():
    first = batch_division_changes(trace(1, options=[BATCH]), draws=False)[0]
    assert first.plan == {"accumulation": {"parts_per_batch": 2}}
    assert first.updates_held_back == 2
    own = batch_division_changes(trace(1, options=[BATCH, ACCUMULATION]), draws=False)[0]
    assert (own.plan, own.updates_held_back, own.micro_batches.by_option) == ({}, 1, True)
    assert own.micro_batches.arguments == ("--batch-size", "6", "--accum", "4")
    with_noise = batch_division_changes(trace(1, options=[BATCH, ACCUMULATION]), draws=True, loop_draws=True)[
        0
    ]
    assert (with_noise.plan, with_noise.micro_batches.by_hand) == (first.plan, True)


def test_why_batches_stay_whole():
    assert (
        why_batches_are_indivisible(trace(1))
        == "memfit found no option and no DataLoader that sets the batch size"
    )
    one = trace(1, loader=replace(LOADER, size=1))
    assert (batch_division_changes(one, draws=False), why_batches_are_indivisible(one)) == (
        [],
        "a batch has one sample",
    )


def test_inputs_that_wait_on_the_host_are_run_with_late_copies():
    choice = CheckpointChoice((RegionSettings(("blocks.0", "blocks.1")),), 0.1, 0.1, 1)
    kept, offloaded = (checkpoint_choice_change(choice, 0, offload=offload) for offload in (False, True))
    assert (kept.uses_side_streams, kept.words) == (False, ("2 modules checkpointed",))
    assert kept.plan == {"checkpointing": {"regions": [{"modules": ["blocks.0", "blocks.1"]}]}}
    assert offloaded.uses_side_streams
    assert offloaded.words == ("2 modules checkpointed", "inputs offloaded")
    assert offloaded.plan == {**kept.plan, "offload": {"what": "inputs"}}
    assert offloaded.optimizer == 0
