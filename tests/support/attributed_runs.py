"""Run scripts that report their own memory figures, and attribute their allocations with memfit."""

import json

from memfit.allocator.timeline import memory_timeline
from memfit.analysis.attribution import attribute_allocations
from memfit.analysis.breakdown import describe_allocation
from memfit.trace.trace_file import read_trace

BEGIN = """
import json, os, sys, torch
from torch import nn
def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
def truth(**figures):
    open("truth.json", "w").write(json.dumps(figures))
"""
FIELDS = ("category", "module", "op", "name")


def run_and_attribute(dry_run, script, steps=1000):
    """Run a script; return its attributed allocations, its trace, and the figures that it reported.

    The script reports its figures by calling ``truth(...)`` once; ``size(tensors)`` returns bytes.

    Args:
        dry_run: the fixture.
        script: the script, without its imports.
        steps: training steps after which the run ends.
    """
    done = dry_run(BEGIN + script, options=("-o", "run.memfit", "--steps", str(steps)))
    assert done.code == 0, done.err
    trace = read_trace(done.folder / "run.memfit")
    attribution = attribute_allocations(trace, memory_timeline(trace))
    found = [describe_allocation(trace, attribution, index) for index in range(len(attribution.born))]
    assert not [allocation for allocation in found if allocation.category == "unknown"]
    return found, trace, json.loads((done.folder / "truth.json").read_text())


def bytes_of(found, **wanted):
    """Return the requested bytes of allocations with the fields given; ``phase`` is that of the malloc."""
    rows = [
        (row.requested, {"phase": row.born.phase.value} | {name: getattr(row, name) for name in FIELDS})
        for row in found
    ]
    return sum(requested for requested, fields in rows if wanted.items() <= fields.items())
