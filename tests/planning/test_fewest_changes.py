"""Advice through the script's own options and its batch size; and how many runs it takes."""

from dataclasses import replace

import pytest

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.analysis.trial_result import TrialResult
from memfit.planning.advice import find_advice
from memfit.planning.fewest_changes import MOST_RUNS
from memfit.records import (
    Category,
    LoaderBatchSize,
    ScriptEnd,
    ScriptOption,
    ScriptOptionPurpose,
)
from support.advised_runs import (
    BF16,
    CHECKPOINT,
    CHECKPOINTING,
    FAILED,
    OFFLOAD,
    advice_for,
    rows,
    too_large,
    trace,
)


def batch(value=64, name="--batch-size"):
    """Return the script's option for its batch size."""
    return ScriptOption(ScriptOptionPurpose.BATCH_SIZE, (name,), value)


def by_batch(word, full, fixed=0, per_sample=1):
    """Return the results of parts of each power of two: so many MiB fixed, and for each sample."""
    sizes = [full >> power for power in range(1, full.bit_length())]
    return {f"{word}{size} x{full // size}": fixed + per_sample * size for size in sizes}


PLAN = "memfit plan, given --gpu or --budget, finds the fastest mix of changes that fits."


def test_batches_are_divided_into_the_largest_parts_that_fit_through_the_scripts_own_option():
    own = {"options": [batch()]}
    first = too_large(400, **own)
    results = {"": 640, **by_batch("--batch-size ", 64, per_sample=10), "checkpointing": 600, "offload": 600}
    answer, tried = advice_for(first, results, **own)
    assert rows(answer) == [("4 micro-batches of 16", 480, 260, True)]
    (piece,) = answer.advice
    assert piece.how == (
        "--batch-size 16, now 64",
        "loss = loss / 4",
        "if (step + 1) % 4 == 0:  # clip, optimizer.step(), zero_grad()",
    )
    assert piece.costs.startswith("4 forwards and backwards for each batch (assumed: the loss is a mean ")
    assert answer.advice_remarks == ("One sample of a batch takes 10.0 MiB (exact).", PLAN)
    # 32 would need 420 MiB. The second whole run records no operations: independence is assumed.
    assert tried == ["", "--batch-size 16 x4", "", "checkpointing", "offload"]


def test_a_smaller_batch_is_advised_only_where_a_script_cannot_accumulate():
    """Each update then sees fewer samples, and takes no gradients along."""
    own = {"options": [batch()]}
    refused = ScriptEnd("refused", 0, "the script cannot accumulate gradients: it has two optimizers")
    results = {"": 640, "--batch-size 16 x4": refused, "--batch-size 16": 160, "checkpointing": FAILED}
    answer, tried = advice_for(too_large(400, **own), results | {"offload": FAILED}, **own)
    assert rows(answer) == [("batch size 16 instead of 64", 480, 260, True)]
    (piece,) = answer.advice
    assert (piece.how, piece.costs) == (
        ("--batch-size 16, now 64",),
        "each update sees 16 samples instead of 64",
    )
    assert tried[1:3] == ["--batch-size 16 x4", "--batch-size 16"]
    assert answer.untried == refused


def test_the_search_for_a_batch_corrects_its_first_guess():
    """Half of the memory does not depend on the batch, although its category suggests that it does."""
    own = {"options": [batch()]}
    results = {"": 640, **by_batch("--batch-size ", 64, 320, 5), "checkpointing": FAILED, "offload": FAILED}
    answer, tried = advice_for(too_large(440, **own), results, **own)
    assert rows(answer)[0][:2] == ("16 micro-batches of 4", 300)
    assert tried[1:3] == ["--batch-size 32 x2", "--batch-size 4 x16"]
    parts = {"--batch-size 16 x4": 40, "--batch-size 32 x2": 310}
    results = {"": 640, **parts, "checkpointing": 600, "offload": 600}
    answer, tried = advice_for(too_large(415, **own), results, **own)
    assert rows(answer)[0][:2] == ("2 micro-batches of 32", 330)
    assert tried[1:3] == ["--batch-size 16 x4", "--batch-size 32 x2"]


def test_a_script_that_can_accumulate_divides_its_batches_by_its_own_option():
    own = {"options": [batch(), ScriptOption(ScriptOptionPurpose.ACCUMULATION, ("--accum",), 2)]}
    gradients = trace(200, category=Category.GRADIENT, **own)
    results = {"": 640, "--batch-size 16 --accum 8": gradients, "checkpointing": FAILED, "offload": FAILED}
    answer, _ = advice_for(too_large(400, **own), results, **own)
    (piece,) = answer.advice
    assert piece.changes == ("4 micro-batches of 16",)
    assert piece.how == ("--batch-size 16 --accum 8, now 64 and 2",)
    assert answer.advice_remarks == (  # 640 MiB / 48: gradients that are kept meanwhile are no sample's
        "One sample of a batch takes 13.3 MiB (exact).",
        PLAN,
    )


def test_what_a_sample_takes_is_not_read_from_two_peaks_in_other_phases():
    own = {"options": [batch()]}
    elsewhere = trace(160, phase=1, **own)
    results = {"": 640, "--batch-size 16 x4": elsewhere, "checkpointing": FAILED, "offload": FAILED}
    assert advice_for(too_large(400, **own), results, **own)[0].advice_remarks == (PLAN,)


def test_batches_are_divided_into_equal_parts():
    own = {"options": [batch(5), ScriptOption(ScriptOptionPurpose.ACCUMULATION, ("--accum",), 1)]}
    results = {"": 640, "--batch-size 1 --accum 5": 200, "checkpointing": FAILED, "offload": FAILED}
    assert advice_for(too_large(400, **own), results, **own)[0].advice[0].how == (
        "--batch-size 1 --accum 5, now 5 and 1",
    )


@pytest.mark.parametrize(
    ("library", "how"),
    [
        (
            "",
            (
                "DataLoader(batch_size=16), now 64",
                "loss = loss / 4",
                "if (step + 1) % 4 == 0:  # clip, optimizer.step(), zero_grad()",
            ),
        ),
        (
            "transformers",
            (
                "a batch size of 16 for the DataLoader that transformers creates, now 64",
                "gradient accumulation over 4 batches, by a setting of transformers",
            ),
        ),
    ],
)
def test_without_an_option_the_loader_gets_parts_of_a_batch(library, how):
    own = {"loader": LoaderBatchSize(64, "train.py:31", library)}
    results = {"": 640, "loader=16 x4": 160, "checkpointing": FAILED, "offload": FAILED}
    (piece,) = advice_for(too_large(400, **own), results, **own)[0].advice
    assert (piece.how, piece.where, piece.fits) == (how, "train.py:31", True)


def test_parts_of_a_batch_join_a_change_that_is_not_enough():
    """How large they may be is found with the other change made."""
    own = {"options": [batch(4)]}
    alone = by_batch("--batch-size ", 4, 332, 77)
    together = {f"checkpointing {words}": size - 220 for words, size in alone.items()}
    results = {"": 640, "checkpointing": 420, "offload": 630, "checkpointing offload": 418}
    answer, _ = advice_for(too_large(425, **own), results | alone | together, **own)
    assert rows(answer) == [(f"{CHECKPOINT} + 2 micro-batches of 2", 374, 366, True)]


def test_if_no_part_is_small_enough_the_smallest_shows_what_it_saves():
    own = {"options": [batch(4)]}
    results = {"": 640, **by_batch("--batch-size ", 4, 600, 10), "checkpointing": FAILED, "offload": FAILED}
    answer, _ = advice_for(too_large(400, **own), results, **own)
    assert rows(answer) == [("4 micro-batches of 1", 30, 710, False)]


def test_an_unknown_batch_size_is_reported():
    answer, _ = advice_for(too_large(400), {"": 640, "checkpointing": FAILED, "offload": FAILED})
    assert answer.advice_remarks[0].startswith("memfit did not try a smaller batch")
    answer, _ = advice_for(trace(400), {"checkpointing": FAILED, "offload": FAILED})
    assert answer.advice_remarks == ()


def test_the_scripts_own_options_are_used_where_it_has_them():
    results = {"--grad-checkpointing": 300, "--mixed_precision bf16": 200, "offload": 390}
    answer, _ = advice_for(trace(400, options=[CHECKPOINTING, BF16]), results)
    assert [(piece.changes, piece.how) for piece in answer.advice] == [
        (("gradient checkpointing",), ("add --grad-checkpointing to the script's options",)),
        (("bf16",), ("add --mixed_precision bf16 to the script's options",)),
        ((OFFLOAD,), ("import memfit; memfit.apply(model, [memfit.Offload()])  # after creating Net",)),
    ]


def test_checkpointing_is_injected_where_the_scripts_own_option_fails():
    results = {"--grad-checkpointing": FAILED, "checkpointing": 300, "offload": 400}
    answer, _ = advice_for(trace(400, options=[CHECKPOINTING]), results)
    assert rows(answer) == [(CHECKPOINT, 100, 400, True)]


def test_options_that_are_on_are_not_advised():
    on = [replace(CHECKPOINTING, value=1), replace(BF16, value=1), batch()]  # and no batch is too large
    _, tried = advice_for(trace(400, options=on), {"offload": 300})
    assert tried == ["offload"]


def test_the_number_of_reruns_is_limited():
    options = [batch(2)] + [
        ScriptOption(ScriptOptionPurpose.LOW_PRECISION, (f"--low{number}",), 0) for number in range(20)
    ]
    tried = []

    def run(change, _what):
        tried.append(change)
        return TrialResult(trace(400, options=options), ("Net",))

    first = too_large(300, options=options)
    answer = find_advice(first, dry_run_of_trace(first), run)
    assert len(tried) == 1 + MOST_RUNS
    stopped = f"memfit stopped after {MOST_RUNS} runs; other combinations may save more."
    assert answer.advice_remarks[-2:] == (stopped, PLAN)
