"""What `memfit replay` and `memfit allocator` print, and their public JSON."""

import io
import json

import msgspec
from rich.console import Console

from memfit.analysis.allocator_comparison import compare_allocator_settings
from memfit.records import Action, AllocatorComparison, DeviceUse, Figure, Mark, MarkKind, Provenance
from memfit.report.public_json import public_json_type, result_to_json
from memfit.report.terminal.allocator_comparison import print_allocator_comparison
from support.traces import BASE, freed, trace_of

MIB, GIB = 1 << 20, 1 << 30
EXACT = Provenance.EXACT
DEVICE = DeviceUse("A100-80GB", Figure(80 * GIB, EXACT), Figure(512 * MIB, EXACT), 0)
ROUNDED = {"conf": "roundup_power2_divisions:2"}
HISTORY = [
    (Action.SEGMENT_ALLOC, BASE, 48 * MIB),
    (Action.ALLOC, BASE, 33 * MIB),
    *freed(BASE, 33 * MIB),
]
STEPS = [Mark(position, MarkKind.TRAINING_STEP, step) for step, position in enumerate((2, 4), 1)]


def compared(confs, marks=(), **options):
    trace = trace_of(HISTORY, device=DEVICE, settings=ROUNDED, marks=marks, versions={"torch": "2.14.1"})
    return compare_allocator_settings(trace, confs, **options)


def printed(found, width=80):
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    print_allocator_comparison(found, console)
    return console.file.getvalue()


def test_a_setting_is_wrapped_between_its_options():
    lines = [line.strip() for line in printed(compared(None, STEPS, smallest=True)).splitlines()]
    for text in ("max_split_size_mb:128", "garbage_collection_threshold:0.8,", "empty_cache() every step"):
        assert [line for line in lines if line.startswith(text)], text
    assert [line for line in lines if line.startswith("PYTORCH_NO_CUDA_MEMORY_CACHING=1")]
    assert max(map(len, lines)) <= 80


def test_a_recommended_setting_shows_its_cost():
    assert (
        "Worth unsetting: PYTORCH_ALLOC_CONF=roundup_power2_divisions:2  reserves 0.01 GiB less (29 %), "
        in (printed(compared([""], STEPS), 200))
    )
    assert "no slower in a steady step" in printed(compared([""], STEPS), 200)
    unknown = printed(compared([""]), 200)
    assert "no slower" not in unknown
    assert "; its cost per step is unknown: fewer than two steps completed" in unknown
    assert "A ? means that fewer than two training steps completed." in unknown


def test_the_memory_fraction_is_named():
    text = printed(compared(["per_process_memory_fraction:0.0001"]), 200)
    assert "80.0 GiB" not in text
    assert "free; limited to 0.0001 of the GPU's memory" in text


def test_json_has_a_row_per_setting():
    found = compared(["", "per_process_memory_fraction:0.0001"], STEPS, smallest=True)
    answer = msgspec.json.decode(result_to_json(found), type=public_json_type(AllocatorComparison))
    assert [(row.setting, row.current, row.fits) for row in answer.settings] == [
        ("roundup_power2_divisions:2", True, True),
        ("", False, True),
        ("per_process_memory_fraction:0.0001", False, False),
    ]
    assert answer.recommended == ""
    assert (answer.total, answer.taken) == (80 * GIB, 512 * MIB)
    assert answer.settings[2].failure.event == 1
    assert answer.settings[2].failure.requested == 33 * MIB
    assert json.loads(result_to_json(found))["rates"]["malloc"] == found.rates.malloc
