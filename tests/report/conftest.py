"""A result to print; ``drive`` runs PyTorch's real allocator, ``show`` a browser."""

import pytest

from memfit.records import (
    DeviceUse,
    DryRun,
    Figure,
    Growth,
    Note,
    Phase,
    Provenance,
    ScriptEnd,
    ScriptLocation,
    Term,
)
from support.allocator_situations import drive
from support.browser import browser, show

__all__ = ["answer", "browser", "drive", "show"]

GIB = 1 << 30


@pytest.fixture
def answer():
    place = ScriptLocation(2, Phase.BACKWARD, "layers.3.mlp", "MmBackward0", "/somewhere/train.py:12")
    exact = Provenance.EXACT
    return DryRun(
        verdict="fits",
        device=DeviceUse(
            "A100-80GB", Figure(80 * GIB, exact), Figure(GIB // 2, Provenance.ASSUMED, "a table"), GIB
        ),
        steps=3,
        peak_allocated=6 * GIB,
        peak_reserved=7 * GIB,
        peak_process=Figure(15 * GIB // 2, Provenance.ASSUMED),
        peak_place=place,
        terms=(
            Term("parameters", Figure(2 * GIB, exact)),
            Term("the rest", Figure(4 * GIB, exact)),
            Term("allocated", Figure(6 * GIB, exact)),
            Term("cached, not allocated", Figure(GIB, exact)),
            Term("reserved", Figure(7 * GIB, exact)),
            Term("CUDA context", Figure(GIB // 2, Provenance.ASSUMED, "a table")),
            Term("process", Figure(15 * GIB // 2, Provenance.ASSUMED)),
        ),
        out_of_memory=None,
        growth=Growth(2, 0, "", leak=False),
        end=ScriptEnd("steps", 0),
        notes=(Note(Provenance.ASSUMED, "a value was read", "train.py:9"),),
        versions={"torch": "2.14.1"},
        command=("train.py", "--big"),
    )
