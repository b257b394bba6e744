"""PyTorch's real allocator, driven on the ghost in many situations; tests in several folders use it."""

import json
import pickle
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from memfit.trace.snapshot import trace_of_snapshot
from support import warm_process

DRIVER = Path(__file__).parents[1] / "allocator" / "drive_allocator.py"

SITUATIONS = {
    "default": ("", {"total": 6 << 30}),
    "several streams": ("", {"streams": 3, "share": 0.3, "total": 3 << 30}),
    "expandable": ("expandable_segments:True", {"streams": 2, "share": 0.2, "total": 4 << 30}),
    "max_split_size": ("max_split_size_mb:64", {"streams": 2, "share": 0.2}),
    "expandable and max_split_size": ("expandable_segments:True,max_split_size_mb:32", {}),
    "roundup": ("roundup_power2_divisions:[1:2,8:4,64:8,>:2]", {"streams": 2}),
    "roundup of all": ("roundup_power2_divisions:8", {}),
    "large segments": ("large_segment_size_mb:48", {}),
    "garbage collection": ("garbage_collection_threshold:0.6", {"fraction": 0.8, "total": 6 << 30}),
    "private pools": ("", {"pools": 2, "streams": 2, "share": 0.1}),
    "captured graphs": ("", {"operations": 800, "graphs": 0.02, "streams": 2, "share": 0.2}),
    "captured graphs, expandable": ("expandable_segments:True", {"operations": 800, "graphs": 0.02}),
    "training": ("", {"operations": 200, "training_steps": 3}),
}


def pytest_generate_tests(metafunc):
    """Parametrize tests that take ``situation`` with all situations, unless they choose some themselves.

    Those of one situation run on one worker, which drives the allocator once.
    """
    chooses = any("situation" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "situation" in metafunc.fixturenames and not chooses:
        groups = {name: pytest.mark.xdist_group(f"driven {name}") for name in SITUATIONS}
        chosen = [pytest.param(name, marks=group) for name, group in groups.items()]
        metafunc.parametrize("situation", chosen)


@cache
def driven(situation, **overrides):
    """Run the driver in a situation, once for each set of arguments.

    Returns:
        The trace, the operation that each event belongs to, and rows of (operation, allocated, reserved) as
        PyTorch counted them after each operation.
    """
    conf, options = SITUATIONS[situation]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pickle"
        done = warm_process.on_ghost(DRIVER, out, json.dumps(options | overrides), PYTORCH_ALLOC_CONF=conf)
        assert done.returncode == 0, done.stderr
        result = pickle.loads(out.read_bytes())  # noqa: S301  the driver wrote it
    trace = replace(trace_of_snapshot(result["snapshot"]), statistics=result["statistics"])
    stamps = [event["user_metadata"] for event in result["snapshot"]["device_traces"][0]]
    # Autograd's threads do not stamp events: they work for the operation in progress.
    operations = np.maximum.accumulate([int(stamp or -1) for stamp in stamps])
    return trace, operations, np.array(result["truth"])


@pytest.fixture
def drive():
    """Return ``driven``."""
    return driven
