"""How a report says what memfit shortened of a run."""

from dataclasses import replace

import pytest

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.records import Mark, MarkKind, Shortened
from memfit.report.terminal.summary import warnings_of_run_stages
from support.html_reports import report, run

OPTION = Shortened("TrainingArguments.max_steps", 6, 1000)


@pytest.mark.parametrize(
    ("each", "words"),
    [
        (Shortened("train.py:3", 3, 1000), "3 of 1,000 batches (train.py:3)"),
        (Shortened("", 3, None), "3 of an unknown number of batches (a loader of a library)"),
        (OPTION, "TrainingArguments.max_steps 6 of 1,000"),
        (Shortened("Trainer.max_epochs", 2, None), "Trainer.max_epochs 2 of no limit"),
    ],
)
def test_loaders_and_options_have_words_of_their_own(each, words):
    assert list(warnings_of_run_stages(dry_run_of_trace(run(shortened=(each,))))) == [f"Shortened: {words}."]


@pytest.mark.parametrize("source", [True, False])
def test_options_are_named_in_a_page_without_source_as_well(source):
    trace = run(shortened=(OPTION, Shortened("train.py:3", 3, 1000)))
    trace = replace(trace, marks=(Mark(1, MarkKind.BATCH, 0), *trace.marks))  # so there are stages
    page = report(trace, source=source)
    assert "TrainingArguments.max_steps 6 of 1,000" in page
    assert ("(train.py:3)" in page) is source
