"""A run compared with a baseline: what counts as growth, and what does not."""

import io
import json
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from memfit.analysis.baseline_check import compare_with_baseline, memory_baseline_of_run
from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.errors import FileFormatError
from memfit.records import Category, CheckVerdict, Figure, MemoryCheck, Provenance
from memfit.report.public_json import baseline_from_json, baseline_to_json, public_json_type, result_to_json
from memfit.report.terminal.run_differences import print_memory_check
from support.advised_runs import trace

RUN = trace(1000)
FOUND = dry_run_of_trace(RUN)
PEAK = 10_000_000
BASE = replace(
    memory_baseline_of_run(RUN, FOUND),
    phase="backward",
    module="net",
    peak={"allocated": PEAK, "reserved": 2 * PEAK, "process": 3 * PEAK},
    terms={"parameters": 1_000_000, "activations": 9_000_000},
    modules={
        "": {"inputs": 10_000},
        **{f"blocks.{number}.fc": {"parameters": 100_000, "activations": 800_000} for number in range(4)},
    },
)


def grown(by=0, *, modules=None, terms=None, **more):
    """Return a run whose peak of allocated bytes, and some of whose parts, grew by so much."""
    changed = {name: dict(held) for name, held in BASE.modules.items()}
    for (module, term), change in (modules or {}).items():
        held = changed.setdefault(module, {})
        held[term] = held.get(term, 0) + change
    kept = {name: size + (terms or {}).get(name, 0) for name, size in BASE.terms.items()}
    peak = BASE.peak | {"allocated": PEAK + by}
    return replace(BASE, **{"peak": peak, "terms": kept, "modules": changed} | more)


def check(run, tolerance=0.01, *, fits=True, baseline=BASE):
    needs = Figure(run.peak["process"], Provenance.ASSUMED)
    return compare_with_baseline(baseline, run, FOUND, needs, tolerance, fits=fits)


def named(figures):
    return [(one.module, one.name, one.change) for one in figures]


def test_a_run_is_as_its_baseline():
    found = check(BASE, 0)
    assert (found.verdict, found.passed, found.grew, found.differences) == (CheckVerdict.SAME, True, (), ())
    assert [one.name for one in found.peaks] == ["allocated", "reserved", "process"]


def test_a_module_is_compared_with_itself():
    wider = {("blocks.2.fc", "parameters"): 2_000}
    found = check(grown(2_000, modules=wider, terms={"parameters": 2_000}))
    assert (found.verdict, found.passed) == (CheckVerdict.GREW, False)
    assert named(found.grew) == [("blocks.2.fc", "parameters", 2_000)]
    assert check(grown(2_000, modules=wider), 0.02).passed
    assert not check(grown(2_000, modules=wider), 0.0199).passed


@pytest.mark.parametrize("peak", ["allocated", "reserved", "process"])
def test_every_peak_counts(peak):
    more = {"peak": BASE.peak | {peak: round(1.011 * BASE.peak[peak])}}
    assert [one.name for one in check(grown(**more)).grew] == [peak]
    more = {"peak": BASE.peak | {peak: round(1.01 * BASE.peak[peak])}}
    assert check(grown(**more)).passed


def test_a_term_counts():
    found = check(grown(11_000, terms={"parameters": 11_000}))
    assert named(found.grew) == [(None, "parameters", 11_000)]


def test_a_module_that_has_another_name_costs_nothing():
    modules = {("blocks.2.fc", "parameters"): -100_000, ("blocks.2.dense", "parameters"): 100_000}
    assert check(grown(modules=modules)).verdict is CheckVerdict.SAME
    assert named(check(grown(1, modules=modules)).grew) == [("blocks.2.dense", "parameters", 100_000)]


def test_a_change_of_a_hundred_thousandth_of_the_peak_does_not_count():
    assert check(grown(100, modules={("scale", "parameters"): 100})).passed
    assert not check(grown(101, modules={("scale", "parameters"): 101})).passed


def test_where_the_peak_has_moved_only_what_lasts_is_compared():
    modules = {("blocks.0.fc", "activations"): 500_000, ("blocks.1.fc", "parameters"): 2_000}
    found = check(grown(2_000, modules=modules, terms={"activations": 500_000}, module="head"))
    assert named(found.grew) == [("blocks.1.fc", "parameters", 2_000)]
    (moved,) = found.differences
    assert moved.startswith("The peak has moved from backward of net to backward of head.")


def test_what_fell_is_reported_and_passes():
    found = check(grown(-200_000, modules={("blocks.1.fc", "activations"): -200_000}))
    assert (found.verdict, found.passed) == (CheckVerdict.FELL, True)
    assert named(found.fell) == [(None, "allocated", -200_000), ("blocks.1.fc", "activations", -200_000)]
    assert "To keep it that low, run the same command with --update" in text_of(found)


def test_growth_decides_even_if_something_else_fell():
    modules = {("blocks.1.fc", "activations"): -200_000}
    assert check(grown(-200_000, modules=modules, terms={}, memory=1)).verdict is CheckVerdict.FELL
    more = {"peak": BASE.peak | {"allocated": PEAK - 200_000, "reserved": 3 * PEAK}}
    assert check(grown(**more)).verdict is CheckVerdict.GREW


def test_what_does_not_fit_does_not_pass():
    found = check(BASE, fits=False)
    assert (found.verdict, found.passed) == (CheckVerdict.NO_FIT, False)
    assert text_of(found).startswith("DOES NOT FIT   needs 0.03 GiB (assumed) of ")


def test_other_versions_cards_and_arguments_are_named():
    other = replace(
        BASE, gpu="T4", memory=1 << 30, steps=2, command=("t.py", "--lr", "1"), versions={"torch": "9"}
    )
    base = replace(BASE, gpu="A100", memory=2 << 30, steps=3, command=("train.py",), versions={"torch": "8"})
    assert check(other, baseline=base).differences == (
        "GPU: A100 in the baseline, T4 in this run.",
        "GPU memory: 2.0 GiB in the baseline, 1.0 GiB in this run.",
        "Training steps: 3 in the baseline, 2 in this run.",
        "Arguments: none in the baseline, --lr 1 in this run.",
        "torch: 8 in the baseline, 9 in this run.",
    )


def test_modules_that_changed_alike_share_a_row():
    wider = {(f"blocks.{number}.fc", "parameters"): 2_000 for number in range(4)}
    found = check(grown(8_000, modules=wider))
    assert len(found.grew) == 4
    assert "400,000  408,000  +8,000  +2.00%  exact  blocks.0-3.fc · parameters" in text_of(found)


def text_of(found):
    text = io.StringIO()
    run = replace(found.run, command=("train.py",))
    print_memory_check(replace(found, run=run), Console(file=text, width=120))
    return text.getvalue()


def test_a_baseline_survives_its_file_which_has_a_line_for_each_module():
    content = baseline_to_json(BASE)
    assert baseline_from_json(content, "b.json") == BASE
    assert json.loads(content)["schema"] == 1
    assert b'\n    "blocks.3.fc": {"parameters": 100000, "activations": 800000}\n' in content
    with pytest.raises(FileFormatError, match=r"baseline from b.json: .*memfit check --update"):
        baseline_from_json(b'{"schema": 1', "b.json")


def test_the_json_has_what_grew():
    found = check(grown(200_000, modules={("blocks.2.fc", "parameters"): 2_000}))
    public = msgspec.json.decode(result_to_json(found), type=public_json_type(MemoryCheck))
    assert [one.name for one in public.grew] == ["allocated", "parameters"]
    assert (public.verdict, public.run.peak) == ("grew", {**BASE.peak, "allocated": PEAK + 200_000})


def test_the_baseline_of_a_run_has_its_terms_and_modules():
    found = memory_baseline_of_run(RUN, FOUND)
    assert found.peak["allocated"] == FOUND.peak_allocated
    assert sum(size for held in found.modules.values() for size in held.values()) == 1000 << 20
    kinds = {term for held in found.modules.values() for term in held}
    assert kinds == {"activations"}
    assert found.terms["activations"] == 1000 << 20
    assert set(memory_baseline_of_run(trace(9, category=Category.PARAMETER), FOUND).modules[""]) == {
        "parameters"
    }
