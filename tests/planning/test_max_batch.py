"""The largest batch size, with runs that are computed instead of made."""

import io
import json
import re
from dataclasses import replace
from functools import partial

import msgspec
import pytest
from rich.console import Console

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.analysis.trial_result import TrialResult
from memfit.errors import TargetError, UsageError
from memfit.planning.batch_size_changes import BatchSizeRun, next_batch_size
from memfit.planning.max_batch import MaxBatchScript, find_max_batch
from memfit.records import (
    BatchLimit,
    LoaderBatchSize,
    MaxBatch,
    ScriptEnd,
    ScriptOption,
    ScriptOptionPurpose,
    SizeBound,
    StepTime,
)
from memfit.report.public_json import public_json_type, result_to_json
from memfit.report.terminal.max_batch import print_max_batch
from support.advised_runs import FAILED, MEASURED, MIB, device, trace

OUT = ScriptEnd("out of memory", 1, "CUDA out of memory", "train.py:9")
CONTEXT = 100  # MiB, outside PyTorch's allocator
NO_TIME = "No time of a step: the script completed no training step, and memfit times the second."
OPTION = ScriptOption(ScriptOptionPurpose.BATCH_SIZE, ("--batch-size",), 4)


def line(size):
    return 200 + 30 * size


class Script:
    """A script whose peak is a function of its batch size; every run is noted."""

    def __init__(self, peak, budget, setting=OPTION, *, arguments=(), more=(), races=False, cached=0):
        self.peak, self.budget, self.setting = peak, budget, setting
        self.arguments, self.more, self.races = arguments, list(more), races
        self.ran, self.cached = [], cached
        self.device = replace(device(budget), context=MEASURED)

    def run(self, change, *, limited):
        size = self.setting.value if isinstance(self.setting, ScriptOption) else self.setting.size
        if change.arguments:
            size = int(change.arguments[-1].rpartition("=")[2])
        size = change.loader.size if change.loader else size
        self.ran.append(size if limited else -size)
        peak = self.peak(size)
        if isinstance(peak, ScriptEnd):
            return peak
        if limited and peak + CONTEXT > self.budget:
            return OUT
        own = isinstance(self.setting, ScriptOption)
        loader = self.more[0] if self.more else None
        made = trace(
            peak,
            cached=self.cached,
            total=self.budget if limited else 1 << 20,
            options=[self.setting] if own and not self.arguments else [],
            loader=loader if own else self.setting,
        )
        return TrialResult(replace(made, device=replace(made.device, context=MEASURED, race=self.races)))

    def find(self, late=None, **settings):
        def run(change, _what, *, limited):
            return (late if late and change.finish_late else self).run(change, limited=limited)

        limited, unlimited = (partial(run, limited=limited) for limited in (True, False))
        script = MaxBatchScript(limited, unlimited, self.arguments, self.device)
        return find_max_batch(script, **settings)


def sizes(found):
    return [(run.size, run.fits) for run in found.runs]


def test_it_fits_at_the_largest_and_runs_out_at_the_next_which_both_ran():
    script = Script(line, 1000)
    found = script.find()
    assert (found.largest, found.limit) == (23, BatchLimit.MEMORY)
    assert sizes(found)[-2:] == [(23, True), (24, False)]
    assert {23, 24, -24} <= set(script.ran)
    assert len(found.runs) <= 4
    assert (found.how, found.as_written) == ("--batch-size 23, now 4", 4)
    assert found.per_sample.bytes == 30 * MIB
    assert found.run(24).needs.bytes == (line(24) + CONTEXT) * MIB


def test_what_pytorch_keeps_only_because_there_is_room_is_not_needed():
    found = Script(line, 1000, cached=40).find()
    assert [run.needs.bytes for run in found.runs] == [(line(run.size) + CONTEXT) * MIB for run in found.runs]


def test_a_smaller_batch_is_found_where_the_script_as_written_does_not_fit():
    found = Script(line, 350).find()
    assert (found.largest, sizes(found)[:2]) == (1, [(1, True), (2, False)])
    assert found.how == "--batch-size 1, now 4"


def test_no_batch_fits_if_one_sample_does_not():
    found = Script(line, 320).find()
    assert (found.largest, found.how) == (None, "")
    assert text_of(found).startswith("NO BATCH FITS   batch size 1 needs 0.32 GiB of 0.31 GiB")


@pytest.mark.parametrize("budget", range(400, 5000, 371))
def test_a_peak_that_bends_and_jumps_takes_few_runs_more(budget):
    """Workspaces come and go with the batch."""

    def peak(size):
        return 150 + 7 * size + size**2 // 16 + 40 * (size % 3)

    found = Script(peak, budget).find()
    n = found.largest
    assert peak(n) + CONTEXT <= budget < peak(n + 1) + CONTEXT
    assert len(found.runs) <= 12


def test_multiples_only():
    found = Script(line, 1000).find(multiple=8)
    assert (found.largest, sizes(found)[-2:]) == (16, [(16, True), (24, False)])
    over = Script(line, 800, replace(OPTION, value=20)).find(multiple=8)
    assert (over.largest, sizes(over)) == (16, [(16, True), (20, False), (24, False)])
    none = Script(line, 400).find(multiple=8)
    assert (none.largest, sizes(none)) == (None, [(4, False)])  # 8 need more


def test_the_loader_is_changed_if_the_script_has_no_option():
    found = Script(line, 1000, LoaderBatchSize(4, "train.py:31")).find()
    assert (found.largest, found.how, found.where) == (23, "DataLoader(batch_size=23), now 4", "train.py:31")


def test_the_data_ends_before_the_memory():
    found = Script(line, 1000, LoaderBatchSize(4, "train.py:31", samples=10)).find()
    assert (found.largest, found.limit) == (10, BatchLimit.DATA)
    assert "no more samples" in text_of(found)
    loader = LoaderBatchSize(4, "train.py:31", samples=10)
    assert Script(line, 1000, more=[loader]).find().largest == 10
    divided = replace(loader, size=2)  # the option's batch is divided: its samples are not the loader's
    assert Script(line, 1000, more=[divided]).find().largest == 23


def test_a_peak_that_does_not_depend_on_the_batch_is_reported():
    script = Script(lambda _: 300, 1000)
    found = script.find()
    assert found.limit is BatchLimit.FLAT
    assert found.runs[-1].size >= 512 * 4
    assert len(found.runs) <= 6
    assert found.remarks[0].startswith("The peak does not depend on the batch size")
    assert found.per_sample is None


def test_a_batch_too_small_to_be_the_peak_is_told_from_one_that_does_not_matter():
    found = Script(lambda size: max(300, 100 + size), 1000).find()
    assert (found.largest, found.limit) == (800, BatchLimit.MEMORY)


def test_memory_that_does_not_grow_steadily_is_reported():
    script = Script(lambda size: 700 if size == 20 else 100 + size, 400, replace(OPTION, value=20))
    found = script.find(multiple=8)
    assert sizes(found)[-2:] == [(200, True), (208, False)]
    assert "20 ran out of memory, although 200 fits." in found.remarks[0]


def test_the_number_of_sizes_is_limited(monkeypatch):
    monkeypatch.setattr("memfit.planning.max_batch._MOST_SIZES", 2)
    found = Script(lambda size: 300 + size**2 // 99, 80 << 10).find()
    assert (found.limit, len(found.runs)) == (BatchLimit.RUNS, 2)
    assert "larger ones may fit: memfit stopped after 2 sizes" in text_of(found)


def test_a_batch_beyond_all_reason_is_not_run():
    found = Script(lambda size: 300 + size.bit_length() % 2, 80 << 10).find()
    assert (found.limit, found.largest) == (BatchLimit.RUNS, 1 << 24)


def test_a_script_that_fails_for_another_reason_is_refused():
    script = Script(lambda size: FAILED if size % 2 else line(size), 1000)
    with pytest.raises(TargetError, match=r"batch size \d+: .*FileExistsError.*--multiple"):
        script.find()
    assert Script(line, 1000).find(multiple=2).largest == 22
    with pytest.raises(TargetError, match=r"as written: .*FileExistsError"):
        Script(lambda _: FAILED, 1000).find()


def test_an_unknown_batch_size_says_what_to_do():
    script = Script(line, 1000, arguments=("--samples", "4"))  # which memfit does not recognise
    with pytest.raises(UsageError, match="name it: --option --samples"):
        script.find()


@pytest.mark.parametrize(
    ("option", "arguments", "how"),
    [
        ("--samples", ("--samples", "4"), "--samples 23, now 4"),
        ("--samples", ("--lr", "1", "--samples=4"), "--samples 23, now 4"),
        ("data.batch=", ("data.batch=4",), "data.batch=23, now 4"),
    ],
)
def test_the_user_names_the_option(option, arguments, how):
    found = Script(line, 1000, replace(OPTION, words=(option,)), arguments=arguments).find(option=option)
    assert (found.largest, found.how) == (23, how)


def test_a_named_option_without_a_value_says_where_to_write_it():
    with pytest.raises(UsageError, match=r"Write it after the script, as in train.py --samples 8\."):
        Script(line, 1000).find(option="--samples")
    assert Script(line, 1000).find(option="--batch-size").largest == 23


def test_an_assumed_context_and_bounds_are_remarked_on(monkeypatch):
    script = Script(line, 1000)
    assert script.find().remarks == (NO_TIME,)
    more = {"bounds": (SizeBound("nonzero", "train.py:7", 5),), "uncertainty": 80 * MIB}
    monkeypatch.setattr(
        "memfit.planning.max_batch.dry_run_of_trace", lambda trace: replace(dry_run_of_trace(trace), **more)
    )
    remarks = script.find().remarks
    assert "may take up to 80.0 MiB more" in remarks[0]
    assert "(nonzero, train.py:7): larger batches may fit." in remarks[1]


def test_where_streams_race_the_late_run_counts():
    """With work that finishes late, it needs 200 MiB more."""
    early, late = (Script(lambda size, more=more: line(size) + more, 1000, races=True) for more in (0, 200))
    found = early.find(late)
    assert (found.largest, sizes(found)[-2:]) == (16, [(16, True), (17, False)])
    assert found.run(17).needs.bytes == (line(17) + 200 + CONTEXT) * MIB
    assert found.remarks == (
        "Streams race: the figures assume that the work on side streams is done as late as possible.",
        NO_TIME,
    )


def test_where_the_run_that_finishes_its_work_at_once_needs_more_that_counts():
    early, late = (Script(lambda size, more=more: line(size) + more, 1000, races=True) for more in (200, 0))
    assert early.find(late).run(16).needs.bytes == (line(16) + 200 + CONTEXT) * MIB


def time_of(seconds, samples, *, spread=0.3):
    """Return the time of a step; what takes it is not shown."""
    low, high = seconds / (1 + spread), seconds * (1 + spread)
    parts = dict.fromkeys(("kinds", "modules", "phases"), ())
    figures = dict.fromkeys(("gpu_seconds", "host_seconds", "utilization"), 0.0)
    return StepTime(
        seconds,
        low,
        high,
        "T4",
        basis="tables",
        host_basis="",
        samples=samples,
        tokens=None,
        **parts,
        **figures,
    )


@pytest.mark.parametrize(
    ("seconds", "spread", "fastest"),
    [
        (lambda size: 1 + size, lambda _: 0.3, 23),
        (lambda size: size + size**2 / 30, lambda _: 0.3, 4),  # which also fits
        (lambda size: size + size**2 / 1000, lambda _: 0.3, 23),  # by 2 %
        (lambda size: size + size**2 / 30, lambda size: 3.0 if size == 4 else 0.0, 23),  # not at both ends
        (lambda _: 0.0, lambda _: 0.3, None),
    ],
    ids=["the largest", "a smaller one", "by little", "not for sure", "unknown"],
)
def test_the_largest_is_not_always_the_fastest(monkeypatch, seconds, spread, fastest):
    def timed(made):
        found = dry_run_of_trace(made)
        size = (found.peak_allocated // MIB - 200) // 30
        time = seconds(size) and time_of(seconds(size), 2 * size, spread=spread(size))
        return replace(found, step_time=time or None, step_time_unknown="" if time else "no second step")

    monkeypatch.setattr("memfit.planning.max_batch.dry_run_of_trace", timed)
    found = Script(line, 1000).find()
    assert (found.largest, found.fastest) == (23, fastest)
    text = text_of(found)
    assert ("4 trains on the most samples in a second, clearly more than 23." in text) is (fastest == 4)
    if fastest is None:
        assert found.remarks[0] == "No time of a step: no second step."
        assert "samples/s" not in text
    else:
        rate = 2 * 23 / seconds(23)
        public = msgspec.json.decode(result_to_json(found), type=public_json_type(MaxBatch))
        assert [run.step_time.samples_per_second for run in public.runs if run.size == 23] == [rate]
        assert re.search(rf"^ *23 .* {rate:,.0f}  fits \(largest\)", text, re.MULTILINE)
        assert "A step with batch size 23 takes about" in text


def text_of(found):
    text = io.StringIO()
    print_max_batch(replace(found, command=("train.py",)), Console(file=text, width=120))
    return text.getvalue()


def test_the_json_has_every_run():
    found = Script(line, 1000).find()
    public = msgspec.json.decode(result_to_json(found), type=public_json_type(MaxBatch))
    assert json.loads(result_to_json(found))["runs"][0]["size"] == 4
    assert [run.size for run in public.runs] == [run.size for run in found.runs]
    assert (public.largest, public.limit, public.budget) == (23, BatchLimit.MEMORY, 1000 * MIB)


def test_the_next_size_lies_between_what_fits_and_what_does_not():
    runs = [BatchSizeRun(8, 800, fits=True), BatchSizeRun(9, 2000, fits=False)]
    assert next_batch_size(runs, range(1, 100), 1000, fixed=0, proven=True) is None
    runs = [BatchSizeRun(8, 800, fits=True), BatchSizeRun(16, 1600, fits=False)]
    assert next_batch_size(runs, range(1, 100), 1000, fixed=0, proven=True) == 10
    assert next_batch_size(runs, [2, 4, 8, 15], 1000, fixed=0, proven=True) == 15
    assert next_batch_size(runs, [2, 4, 8, 15], 1000, fixed=0, proven=False) is None


def test_a_line_is_not_trusted_too_far_nor_too_long():
    runs = [BatchSizeRun(8, 100, fits=True), BatchSizeRun(9, 101, fits=True)]
    assert next_batch_size(runs, range(1, 10000), 10000, fixed=0, proven=True) == 9 * 16
    ends = [BatchSizeRun(100, 100, fits=True), BatchSizeRun(1000, 10**6, fits=False)]
    tried = [BatchSizeRun(size, 99, fits=True) for size in (1, 2, 3)]
    assert next_batch_size([*ends, *tried], range(1, 10000), 200, fixed=0, proven=True) == 101
    tried.append(BatchSizeRun(4, 99, fits=True))
    assert next_batch_size([*ends, *tried], range(1, 10000), 200, fixed=0, proven=True) == 550
