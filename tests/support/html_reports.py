"""HTML reports for tests: a small handmade run, and the data of a page, read without the page's code."""

import base64
import gzip
import json
import re
import struct
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np

from memfit.allocator.timeline import memory_timeline
from memfit.analysis.attribution import attribute_allocations
from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.records import (
    Action,
    Category,
    DeviceUse,
    EventLabel,
    Figure,
    Frame,
    Mark,
    MarkKind,
    Note,
    Phase,
    Provenance,
    ScriptEnd,
    TensorInfo,
)
from memfit.report.html import run_report_html
from support.traces import BASE, Event, trace_of

MIB, GIB = 1 << 20, 1 << 30
LABELS = (
    EventLabel(Phase.SETUP, "", "", -1),
    EventLabel(Phase.FORWARD, "blocks.0.fc", "", -1),
    EventLabel(Phase.FORWARD, "blocks.1.fc", "", -1),
    EventLabel(Phase.BACKWARD, "blocks.1.fc", "AddmmBackward0", 1),
    EventLabel(Phase.OPTIMIZER, "", "", -1),
)
SETUP, FIRST, SECOND, BACKWARD, OPTIMIZER = range(5)
FRAMES = (
    Frame("/home/ada/work/train.py", 10, "main", user=True),
    Frame("/home/ada/work/model.py", 22, "forward", user=True),
)
TENSORS = (
    TensorInfo("blocks.0.fc", "weight", "float32", (1024, 1024)),
    TensorInfo("blocks.0.fc", "weight.grad", "float32", (1024, 1024)),
)
LARGE, SMALL = BASE, BASE + GIB
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202eevil\u2066\x00"
NOT_UTF8 = "caf\udce9.py"  # as Python decodes a file name that is not UTF-8
LONG = "layer." + "x" * 10_000


def run(steps=3, activations=4, **fields):
    """Return a trace of a few training steps, with a block that another stream uses for a while."""
    history = [
        Event(Action.SEGMENT_ALLOC, LARGE, 200 * MIB, label=SETUP),
        Event(Action.SEGMENT_ALLOC, SMALL, 2 * MIB, label=SETUP),
        Event(Action.ALLOC, LARGE, 4 * MIB, 0, SETUP, 0, Category.PARAMETER),
        Event(Action.ALLOC, SMALL, 700, 0, SETUP, 0, Category.BUFFER),
    ]
    tensor = [-1, -1, 0, -1]
    marks = []
    for step in range(steps):
        marks.append(Mark(len(history), MarkKind.FORWARD, step))
        made = [LARGE + (4 + 8 * i) * MIB for i in range(activations)]
        for i, address in enumerate(made):
            history.append(
                Event(Action.ALLOC, address, 8 * MIB - 100, 0, FIRST + i % 2, 1, Category.ACTIVATION)
            )
        marks.append(Mark(len(history), MarkKind.BACKWARD, step))
        gradient = LARGE + (4 + 8 * activations) * MIB
        history.append(Event(Action.ALLOC, gradient, 4 * MIB, 0, BACKWARD, -1, Category.GRADIENT))
        tensor += [-1] * activations + [1]
        for address in reversed(made):
            history.append(Event(Action.FREE_REQUESTED, address, 8 * MIB - 100, 0, BACKWARD))
            tensor.append(-1)
        for address in made:  # only now is the other stream done with them
            history.append(Event(Action.FREE_COMPLETED, address, 8 * MIB - 100, 0, BACKWARD))
            tensor.append(-1)
        work = gradient + 4 * MIB
        history += [Event(Action.ALLOC, work, 8 * MIB, 0, OPTIMIZER, 0)]
        history += [
            Event(a, work, 8 * MIB, 0, OPTIMIZER) for a in (Action.FREE_REQUESTED, Action.FREE_COMPLETED)
        ]
        history += [
            Event(a, gradient, 4 * MIB, 0, OPTIMIZER) for a in (Action.FREE_REQUESTED, Action.FREE_COMPLETED)
        ]
        tensor += [-1] * 5
        marks.append(Mark(len(history), MarkKind.OPTIMIZER_STEP, 0))
        marks.append(Mark(len(history), MarkKind.TRAINING_STEP, step))
    defaults = {
        "labels": LABELS,
        "frames": FRAMES,
        "stacks": ((0,), (1, 0)),
        "marks": tuple(marks),
        "tensors": TENSORS,
        "device": DeviceUse(
            "A100-80GB",
            Figure(80 * GIB, Provenance.EXACT),
            Figure(GIB // 2, Provenance.ASSUMED, "a table"),
            0,
        ),
        "end": ScriptEnd("steps", 0),
        "versions": {"torch": "2.14.1"},
        "command": ("/home/ada/work/train.py", "--data", "/home/ada/secret"),
    }
    trace = trace_of(history, **defaults | fields)
    return replace(trace, events=replace(trace.events, tensor=np.array(tensor, np.int32)))


def evil():
    """Return a run in which every string is hostile."""
    trace = run(command=(EVIL, EVIL), versions={"torch": EVIL, EVIL: EVIL})
    names = tuple(replace(label, module=f"{EVIL}.{i}.{LONG}", op=EVIL) for i, label in enumerate(LABELS))
    return replace(
        trace,
        labels=names,
        frames=tuple(
            replace(frame, file=f"{EVIL}{frame.file}/{NOT_UTF8}", function=EVIL) for frame in FRAMES
        ),
        tensors=(TensorInfo(EVIL, LONG + EVIL, EVIL, (1,)), TensorInfo(LONG, "\ud800", "float32", ())),
        notes=(Note(Provenance.ASSUMED, EVIL, EVIL), Note(Provenance.EXACT, LONG)),
        device=replace(trace.device, name=EVIL),
    )


def report(trace, *, advice=None, needs=None, untried=None, ranks=(), peaks=None, **options):
    """Return the HTML page of a trace."""
    line = memory_timeline(trace)
    summary = dry_run_of_trace(trace)
    found = replace(summary, advice=advice, needs=needs, untried=untried, ranks=ranks, range=peaks)
    return run_report_html(trace, line, attribute_allocations(trace, line), found, **options)


def unpacked(text):
    """Return the facts, words and columns of a payload, or of the page that holds it."""
    found = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', text)
    raw = gzip.decompress(base64.b64decode(found[1] if found else text))
    (length,) = struct.unpack_from("<I", raw)
    head = json.loads(raw[4 : 4 + length])
    columns = {
        name: np.frombuffer(raw, f"<{kind}", count, 4 + length + offset).astype(np.int64)
        for name, (kind, offset, count) in head["columns"].items()
    }
    return SimpleNamespace(facts=head["facts"], words=head["words"], columns=columns)


def blocks(held):
    """Return columns for the blocks of a page: born, freed, done, address, requested, beyond and layer."""
    columns = held.columns
    born = columns["block.born"]
    freed = born + columns["block.life"]
    return SimpleNamespace(
        born=born,
        freed=freed,
        done=freed + columns["block.wait"],
        address=columns["block.address"],
        requested=columns["block.requested"],
        beyond=columns["block.beyond"],
        layer=np.array([layer["name"] for layer in held.facts["layers"]])[columns["block.layer"]],
    )


def sums(held, moment):
    """Return the bytes per layer at a moment, summed over a page's blocks and its ``rest`` columns."""
    drawn, rest = blocks(held), held.columns
    found = Counter()
    alive = (drawn.born <= moment) & (moment < drawn.freed)
    so_far = rest["rest.moment"] <= moment
    for index, layer in enumerate(held.facts["layers"]):
        found[layer["name"]] += int(drawn.requested[alive & (drawn.layer == layer["name"])].sum())
        found[layer["name"]] += int(rest["rest.requested"][so_far & (rest["rest.layer"] == index)].sum())
    found["rounding"] += int(drawn.beyond[alive].sum() + rest["rest.beyond"][so_far].sum())
    return {name: size for name, size in found.items() if size}


class Elements(HTMLParser):
    """Every element of a page with its attributes, and its text outside scripts and styles."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.found, self.text, self._inside = [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.text += data
