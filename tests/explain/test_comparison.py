"""On which device a trace is replayed, with which settings, and what is said of it."""

import pytest

from memfit.devices import find_device
from memfit.errors import UsageError
from memfit.explain.comparison import compare
from memfit.records import Action, DeviceUse, Figure, Provenance, ScriptEnd
from traces import BASE, freed, trace_of

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
def test_the_device_is_the_traces_but_for_what_is_named(options, total, taken):
    found = compare(trace_of(HISTORY, device=DEVICE), [], **options)
    assert (found.total, found.taken) == (total, taken)


def test_a_trace_without_a_device_wants_one():
    with pytest.raises(UsageError, match="Name one: --gpu, or --memory"):
        compare(trace_of(HISTORY), [])
    assert compare(trace_of(HISTORY), [], memory=GIB).total == GIB


@pytest.mark.parametrize("memory", [0, 612 * MIB])
def test_where_nothing_is_left_nothing_is_replayed(memory):
    with pytest.raises(
        UsageError, match=f"{memory} bytes of memory, of which the CUDA context takes 536870912"
    ):
        compare(trace_of(HISTORY, device=DEVICE), [], memory=memory)


def test_the_traces_own_settings_come_first_and_once():
    trace = trace_of(HISTORY, device=DEVICE, settings={"conf": "max_split_size_mb:64"})
    tried = []
    found = compare(trace, ["expandable_segments:True", "max_split_size_mb:64"], on_progress=tried.append)
    assert tried == ["max_split_size_mb:64", "expandable_segments:True"]
    assert [row.setting.name for row in found.outcomes] == tried
    assert found.current is found.outcomes[0]


def test_what_is_not_known_is_noted():
    told = compare(trace_of(HISTORY, device=DEVICE), [])
    assert told.notes == ()
    late = [*freed(BASE, 2 * MIB), (Action.SEGMENT_FREE, BASE, 20 * MIB)]
    end = ScriptEnd("out of memory", 1)
    notes = [note.text for note in compare(trace_of(late, (), end=end), [], memory=GIB).notes]
    assert [" ".join(text.split()[:4]) for text in notes] == [
        "What the CUDA context",
        "The history begins with",
        "The script ran out",
    ]
    assert "20,971,520 bytes reserved" in notes[1]
