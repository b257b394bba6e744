"""A small trace, and a file that holds it."""

import numpy as np
import pytest

from memfit.records import (
    Action,
    Category,
    DeviceUse,
    EventLabel,
    Events,
    Figure,
    Frame,
    JobRank,
    LoaderBatchSize,
    Mark,
    MarkKind,
    Phase,
    Provenance,
    ScriptEnd,
    ScriptOption,
    ScriptOptionPurpose,
    TensorInfo,
    Trace,
)
from memfit.trace.trace_file import write_trace


@pytest.fixture
def trace():
    """Return a trace of two events, with one entry in each table that they refer to."""
    events = Events(
        action=np.array([Action.SEGMENT_ALLOC, Action.ALLOC], np.uint8),
        address=np.array([1 << 45, 1 << 45], np.uint64),
        size=np.array([2 << 20, 100], np.int64),
        stream=np.array([0, 0], np.int32),
        time=np.array([1, 2], np.int64),
        label=np.array([0, 0], np.int32),
        stack=np.array([-1, 0], np.int32),
        category=np.array([0, Category.PARAMETER], np.uint8),
        pool=np.array([1, 1], np.int32),
        tensor=np.array([-1, 0], np.int32),
    )
    figure = Figure(1 << 30, Provenance.EXACT, "here")
    return Trace(
        events=events,
        labels=(EventLabel(Phase.FORWARD, "layers.0", "", 0),),
        stacks=((0,),),
        frames=(Frame("train.py", 3, "main", user=True),),
        marks=(Mark(1, MarkKind.FORWARD, 0),),
        segments=(),
        device=DeviceUse("A100", figure, figure, 0),
        end=ScriptEnd("end", 0),
        settings={},
        statistics={},
        versions={"torch": "2.14.1"},
        command=("train.py",),
        pools=((0, 0), (1, 0)),
        tensors=(TensorInfo("layers.0", "weight", "float32", (5, 5)),),
        options=(ScriptOption(ScriptOptionPurpose.BATCH_SIZE, ("--batch-size",), 64),),
        loader=LoaderBatchSize(64, "train.py:31"),
        rank=JobRank(3, 8),
    )


@pytest.fixture
def file(tmp_path, trace):
    path = tmp_path / "run.memfit"
    write_trace(trace, path)
    return path
