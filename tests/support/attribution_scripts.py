"""Scripts that say their own truth, in bytes, and what memfit says of them."""

import json

from memfit.allocator.timeline import timeline
from memfit.analysis.attribution import attribute
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


def all_told(dry_run, script, steps=1000):
    """Run a script; return what every allocation is, the trace, and the script's own truth.

    It may call ``truth(...)`` once, and ``size(tensors)`` for bytes. It is ended after so many steps.
    """
    done = dry_run(BEGIN + script, options=("-o", "run.memfit", "--steps", str(steps)))
    assert done.code == 0, done.err
    trace = read_trace(done.folder / "run.memfit")
    attribution = attribute(trace, timeline(trace))
    found = [describe_allocation(trace, attribution, index) for index in range(len(attribution.born))]
    assert not [one for one in found if one.category == "unknown"]
    return found, trace, json.loads((done.folder / "truth.json").read_text())


def bytes_of(found, **wanted):
    """Sum allocations whose fields are as wanted; a phase is that in which it was made."""
    fields = [
        (one, {"phase": one.born.phase.value} | {name: getattr(one, name) for name in FIELDS})
        for one in found
    ]
    return sum(one.requested for one, has in fields if wanted.items() <= has.items())
