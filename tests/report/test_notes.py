"""Notes in the summary: a line that counts them, and in full those that figures may depend on."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from memfit.records import Figure, Note, Provenance, SizeBound, Term
from memfit.report.terminal.notes import note_lines

READ = "The script read a GPU value, so it returned {}."
ONE = Note(Provenance.ASSUMED, READ.format(1.0), "/s/train.py:10")
GRAPHS = Note(Provenance.EXACT, "torch.compile made 2 graphs.")
UPPER = Note(Provenance.ASSUMED, "nonzero finds 9 elements.", "/s/train.py:7", sizes=True, bound="nonzero")
UNKNOWN = replace(UPPER, bound="")
CUDNN = Note(Provenance.SIMULATED, "The sizes are those of cuDNN 9.", sizes=True, workspaces=True)


ASSUMPTION = "1 assumption; --notes lists it."


def shown(answer, *notes, full=False, hints=True, bounds=(), terms=(), width=200):
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    unsourced = tuple(replace(term, figure=replace(term.figure, source="")) for term in answer.terms)
    run = replace(answer, notes=notes, bounds=bounds, terms=terms or unsourced)
    for line in note_lines(run, full=full, hints=hints):
        console.print(line)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("notes", "line"),
    [
        ((ONE,), "1 assumption; --notes lists it."),
        ((ONE, replace(ONE, where="/s/train.py:31")), "1 assumption; --notes lists it."),
        ((ONE, replace(ONE, text=READ.format(False))), "2 assumptions; --notes lists them."),
        ((ONE, GRAPHS), "1 assumption and 1 remark; --notes lists them."),
        ((GRAPHS,), "1 remark; --notes lists it."),
    ],
)
def test_notes_without_a_known_effect_on_figures_are_counted(answer, notes, line):
    assert shown(answer, *notes) == [line]


def test_a_run_without_notes_says_nothing(answer):
    assert shown(answer) == shown(answer, full=True) == []


def test_the_full_list_begins_with_the_sources_of_what_is_outside_the_allocator(answer):
    context = Term("CUDA context", Figure(758 << 20, Provenance.ASSUMED, "observed on an H100"))
    process = Term("process", Figure(1, Provenance.ASSUMED, "reserved + CUDA context"))
    driver = Figure(480 << 20, Provenance.ASSUMED, "NVML's total less CUDA's")
    some, terms = replace(answer, device=replace(answer.device, driver=driver)), (context, process)
    assert shown(some, ONE, terms=terms) == ["1 assumption; --notes lists it."]
    heading, first, second, *_, last = shown(some, ONE, terms=terms, full=True)
    assert heading == "Outside PyTorch's allocator:"
    assert first == "  assumed    CUDA context: observed on an H100"
    reserved = "480.0 MiB that the driver reserves, which nvidia-smi omits"
    assert second == f"  assumed    in NVML's v1: {reserved}: NVML's total less CUDA's"
    assert ONE.text in last


@pytest.mark.parametrize(("length", "is_whole"), [(2_000, True), (2_001, False)])
@pytest.mark.parametrize("full", [True, False])
def test_a_note_is_printed_whole_unless_it_is_very_long(answer, full, length, is_whole):
    long = replace(CUDNN, text="x" * length, workspaces=False)
    assert any("x" * length in line for line in shown(answer, long, full=full, width=3_000)) is is_whole


@pytest.mark.parametrize(("held", "in_full"), [(0, False), (74, False), (75, True)])
def test_a_note_on_an_upper_bound_is_shown_if_more_than_a_hundredth_follows_from_it(answer, held, in_full):
    small = replace(answer, peak_process=Figure(7450, Provenance.ASSUMED))
    lines = shown(small, UPPER, bounds=(SizeBound("nonzero", UPPER.where, held),))
    assert lines == [f"note (assumed): {UPPER.text}  ({UPPER.where})" if in_full else ASSUMPTION]


def test_notes_that_are_alike_have_their_effect_together(answer):
    small, other = replace(answer, peak_process=Figure(7450, Provenance.ASSUMED)), "/s/train.py:31"
    bounds = (SizeBound("nonzero", UPPER.where, 40), SizeBound("nonzero", other, 40))
    (line,) = shown(small, UPPER, replace(UPPER, where=other), bounds=bounds)
    assert line == f"note (assumed): {UPPER.text}  (2 places: {UPPER.where}, 31)"


def test_a_note_whose_effect_on_sizes_is_unknown_is_shown_in_full(answer):
    assert shown(answer, ONE, UNKNOWN) == [
        "note (assumed): nonzero finds 9 elements.  (/s/train.py:7)",
        "1 more assumption; --notes lists it.",
    ]


def test_notes_that_differ_in_numbers_and_places_alone_are_one_with_a_range(answer):
    larger = replace(UNKNOWN, text=UPPER.text.replace("9", "1,024"), where="/s/train.py:31")
    smaller = replace(UNKNOWN, text=UPPER.text.replace("9", "3"))
    line = "note (assumed): nonzero finds 3 to 1,024 elements.  (2 places: /s/train.py:7, 31)"
    assert shown(answer, UNKNOWN, larger, smaller) == [line]
    other = replace(larger, text=larger.text.replace("nonzero", "unique"))
    assert len(shown(answer, UNKNOWN, other)) == 2


@pytest.mark.parametrize(("workspaces", "in_full"), [(75, True), (76, True), (74, False), (0, False)])
def test_a_note_on_simulated_workspaces_is_shown_if_they_exceed_a_hundredth(answer, workspaces, in_full):
    terms = (Term("workspaces", Figure(workspaces, Provenance.SIMULATED)), *answer.terms)
    small = replace(answer, terms=terms, peak_process=Figure(7450, Provenance.ASSUMED))
    lines = shown(small, CUDNN)
    assert lines == (["note (simulated): The sizes are those of cuDNN 9."] if in_full else [ASSUMPTION])


def test_workspaces_that_activations_include_or_that_are_assumed_have_no_known_bound(answer):
    for note in (replace(CUDNN, activations=True), replace(CUDNN, provenance=Provenance.ASSUMED)):
        assert shown(answer, note)[0].startswith("note (")


def test_all_notes_are_listed_by_their_effect_with_the_lines_of_each_file(answer):
    notes = (
        GRAPHS,
        ONE,
        replace(ONE, where="/s/train.py:31"),
        replace(ONE, where="/s/model.py:5"),
        replace(ONE, where="layers.0"),
        UPPER,
    )
    places = "/s/train.py:10, 31; /s/model.py:5; layers.0"
    assert shown(answer, *notes, full=True) == [
        "Notes that the figures depend on:",
        "  assumed    nonzero finds 9 elements.  (/s/train.py:7)",
        "Assumptions whose effect on the figures is unknown:",
        f"  assumed    The script read a GPU value, so it returned 1.0.  (4 places: {places})",
        "Remarks:",
        "  exact      torch.compile made 2 graphs.",
    ]


def test_of_more_than_eight_notes_those_with_the_largest_effect_are_shown(answer):
    words = "abcdefghij"
    notes = [replace(UPPER, text=f"note {word}", where=f"/s/{word}.py:1") for word in words]
    bounds = tuple(SizeBound("nonzero", note.where, (number + 1) << 30) for number, note in enumerate(notes))
    lines = shown(answer, *notes, GRAPHS, bounds=bounds)
    assert [line.split()[3] for line in lines[:-1]] == list("jihgfedc")
    assert lines[-1] == "2 more assumptions and 1 remark; --notes lists them."
    assert sum("note " in line for line in shown(answer, *notes, full=True)) == 10


def test_a_result_in_python_refers_to_its_own_notes(answer):
    assert shown(answer, ONE, hints=False) == ["1 assumption; see `notes`."]
