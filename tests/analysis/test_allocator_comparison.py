"""The device and the settings a trace is replayed under, and the notes on the result."""

import pytest

from memfit.analysis.allocator_comparison import compare_allocator_settings
from memfit.devices import find_device
from memfit.errors import UsageError
from memfit.records import Action, DeviceUse, Figure, Mark, MarkKind, Provenance, ScriptEnd
from support.traces import BASE, freed, trace_of

MIB, GIB = 1 << 20, 1 << 30
HISTORY = [
    (Action.SEGMENT_ALLOC, BASE, 20 * MIB),
    (Action.ALLOC, BASE, 2 * MIB),
    *freed(BASE, 2 * MIB),
]
EXACT = Provenance.EXACT
DEVICE = DeviceUse("A100-80GB", Figure(80 * GIB, EXACT), Figure(512 * MIB, EXACT), 100 * MIB)
CARD = find_device("RTX-3060")


@pytest.mark.parametrize(
    ("options", "total", "taken"),
    [
        ({}, 80 * GIB, 612 * MIB),
        ({"memory": GIB}, GIB, 612 * MIB),
        ({"in_use": 0}, 80 * GIB, 512 * MIB),
        ({"device": CARD}, CARD.total_bytes, CARD.context_bytes + 100 * MIB),
        ({"device": CARD, "memory": GIB, "in_use": 1}, GIB, CARD.context_bytes + 1),
    ],
)
def test_the_device_is_that_of_the_trace_unless_overridden(options, total, taken):
    found = compare_allocator_settings(trace_of(HISTORY, device=DEVICE), [], **options)
    assert (found.total, found.taken) == (total, taken)


def test_a_trace_without_a_device_needs_one_named():
    with pytest.raises(UsageError, match="Name a GPU with --gpu, or give the GPU's memory with --memory"):
        compare_allocator_settings(trace_of(HISTORY), [])
    assert compare_allocator_settings(trace_of(HISTORY), [], memory=GIB).total == GIB


@pytest.mark.parametrize(("memory", "shown"), [(0, "0 B"), (612 * MIB, "612.0 MiB")])
def test_no_memory_left_is_an_error(memory, shown):
    words = f"of its {shown}, the CUDA context uses 512.0 MiB, and other processes use 100.0 MiB"
    with pytest.raises(UsageError, match=words):
        compare_allocator_settings(trace_of(HISTORY, device=DEVICE), [], memory=memory)


def test_the_traces_own_settings_come_first_and_once():
    trace = trace_of(HISTORY, device=DEVICE, settings={"conf": "max_split_size_mb:64"})
    tried = []
    found = compare_allocator_settings(
        trace, ["expandable_segments:True", "max_split_size_mb:64"], on_progress=tried.append
    )
    assert tried == ["max_split_size_mb:64", "expandable_segments:True"]
    assert [row.setting.name for row in found.outcomes] == tried
    assert found.current is found.outcomes[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": 12.5e9}, "memory must be a whole number of bytes, 0 or more, not 12500000000.0"),
        ({"memory": "12GiB"}, "memory must be a whole number of bytes, 0 or more, not '12GiB'"),
        ({"in_use": -5}, "in_use must be a whole number of bytes, 0 or more, not -5"),
        (
            {"confs": "throw_on_cudamalloc_oom:True"},
            "needs PyTorch 2.12 or later, but the trace was made with PyTorch 2.11",
        ),
        (
            {"confs": ["large_segment_size_mb:12"], "torch": "2.10.0"},
            "needs PyTorch 2.11 or later, but the trace was made with PyTorch 2.10",
        ),
    ],
)
def test_invalid_options_are_refused(options, words):
    trace = trace_of(HISTORY, device=DEVICE, versions={"torch": options.pop("torch", "2.11.0")})
    with pytest.raises(UsageError, match=words):
        compare_allocator_settings(trace, options.pop("confs", []), **options)


def test_a_single_conf_may_be_a_string():
    found = compare_allocator_settings(trace_of(HISTORY, device=DEVICE), "expandable_segments:True")
    assert [row.setting.name for row in found.outcomes] == ["", "expandable_segments:True"]


def test_only_settings_of_the_version_are_tried():
    trace = trace_of(HISTORY, device=DEVICE, versions={"torch": "2.10.0"})
    tried = " ".join(row.setting.name for row in compare_allocator_settings(trace, None).outcomes)
    assert "max_split_size_mb" in tried
    assert "large_segment" not in tried


def test_the_cache_is_emptied_each_step_only_if_steps_are_known():
    steps = [Mark(position, MarkKind.TRAINING_STEP, step) for step, position in enumerate((2, 4), 1)]
    for marks in (steps, []):
        tried = [
            row.setting.name
            for row in compare_allocator_settings(
                trace_of(HISTORY, device=DEVICE, marks=marks), None
            ).outcomes
        ]
        assert ("empty_cache() every step" in tried) == bool(marks)


def test_a_replay_that_does_not_end_as_pytorch_did_is_noted():
    end = {"allocated_bytes.all.current": 0, "reserved_bytes.all.current": 20 * MIB}
    agrees = compare_allocator_settings(trace_of(HISTORY, device=DEVICE, statistics=end), [])
    assert not [note for note in agrees.notes if "does not model" in note.text]
    end["allocated_bytes.all.current"] = 512
    differs = compare_allocator_settings(trace_of(HISTORY, device=DEVICE, statistics=end), [])
    (note,) = [note for note in differs.notes if "does not model" in note.text]
    assert "but PyTorch ended with 512 allocated and 20,971,520 reserved" in note.text
    assert note.provenance is Provenance.ASSUMED
    elsewhere = compare_allocator_settings(trace_of(HISTORY, device=DEVICE, statistics=end), [], memory=GIB)
    assert not [note for note in elsewhere.notes if "does not model" in note.text]


def test_a_harmful_setting_is_worth_unsetting():
    small = [(Action.SEGMENT_ALLOC, BASE, 48 * MIB), (Action.ALLOC, BASE, 33 * MIB)]
    trace = trace_of(small, device=DEVICE, settings={"conf": "roundup_power2_divisions:2"})
    found = compare_allocator_settings(trace, [""])
    assert found.recommended is found.outcomes[1]


def test_unknowns_are_noted():
    known = compare_allocator_settings(trace_of(HISTORY, device=DEVICE, versions={"torch": "2.14.1"}), [])
    assert known.notes == ()
    late = [*freed(BASE, 2 * MIB), (Action.SEGMENT_FREE, BASE, 20 * MIB)]
    end = ScriptEnd("out of memory", 1)
    notes = [
        note.text for note in compare_allocator_settings(trace_of(late, (), end=end), [], memory=GIB).notes
    ]
    assert [" ".join(text.split()[:4]) for text in notes] == [
        "A memory snapshot does",
        "The CUDA context is",
        "The allocator history begins",
        "The script ran out",
    ]
    assert "20,971,520 bytes already reserved" in notes[2]
