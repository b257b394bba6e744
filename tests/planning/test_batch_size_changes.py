"""How batches are divided: by the script's own options, by an engine, or by skipping updates."""

import pytest

from memfit.planning.batch_size_changes import batch_division_changes
from memfit.records import Action, ScriptOption, ScriptOptionPurpose
from support.traces import BASE, trace_of

SIZE = ScriptOption(ScriptOptionPurpose.BATCH_SIZE, ("--batch-size",), 8)
STEPS = ScriptOption(ScriptOptionPurpose.ACCUMULATION, ("--accumulation-steps",), 3)
PARTS = ScriptOption(ScriptOptionPurpose.PARTS, ("--parts-per-batch",), 1)


def halved(*options):
    trace = trace_of([(Action.SEGMENT_ALLOC, BASE, 1 << 20), (Action.ALLOC, BASE, 512)], options=options)
    return batch_division_changes(trace, draws=False)[0]


@pytest.mark.parametrize(
    ("options", "arguments", "skipped", "settings", "by"),
    [
        ((SIZE,), ("--batch-size", "4"), 2, {"accumulation": {"parts_per_batch": 2}}, (False, False)),
        ((SIZE, STEPS), ("--batch-size", "4", "--accumulation-steps", "6"), 1, {}, (True, False)),
        (
            (SIZE, PARTS),
            ("--parts-per-batch", "2"),  # of whole batches
            1,
            {"accumulation": {"parts_per_batch": 2}},
            (True, True),
        ),
    ],
    ids=["by skipped updates", "by options", "by an engine"],
)
def test_a_batch_is_halved(options, arguments, skipped, settings, by):
    plan = halved(*options)
    divided = plan.micro_batches
    assert (divided.count, divided.size) == (2, 4)
    assert (plan.arguments, plan.updates_held_back, plan.plan) == (arguments, skipped, settings)
    assert (divided.by_option, divided.by_engine) == by
