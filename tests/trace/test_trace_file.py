"""Trace files: exact round trips, and complete writes or none."""

import json
import os
import re
import stat
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import FileFormatError, OutputError, UsageError
from memfit.records import (
    Action,
    BatchSize,
    Category,
    DeviceUse,
    EventLabel,
    Events,
    Figure,
    Frame,
    LoaderScan,
    Mark,
    MarkKind,
    Note,
    Phase,
    Provenance,
    ScriptEnd,
    Segment,
    SnapshotBlock,
    TensorInfo,
    Trace,
)
from memfit.trace import trace_file, trace_limits
from memfit.trace.trace_file import looks_like_trace_file, read_trace, write_trace
from memfit.trace.trace_limits import MAX_TEXT

LARGEST = (1 << 63) - 1

# -- random traces ---------------------------------------------------------------------------------

naturals = st.integers(0, LARGEST)
figures = st.builds(Figure, naturals, st.sampled_from(Provenance), st.text())
blocks = st.builds(SnapshotBlock, naturals, naturals, naturals, st.sampled_from(trace_file.BLOCK_STATES))


def index_below(count, lowest=0):
    return st.integers(lowest, count - 1)


@st.composite
def columns(draw, labels, stacks, pools, tensors):
    n = draw(st.integers(0, 30))

    def column(numbers, dtype):
        return np.array(draw(st.lists(numbers, min_size=n, max_size=n)), dtype)

    return Events(
        action=column(st.integers(0, max(Action)), np.uint8),
        address=column(naturals, np.uint64),
        size=column(naturals, np.int64),
        stream=column(st.integers(0, (1 << 31) - 1), np.int32),
        time=column(st.integers(-(1 << 63), LARGEST), np.int64),
        label=column(index_below(labels, -1), np.int32),
        stack=column(index_below(stacks, -1), np.int32),
        category=column(st.integers(0, max(Category)), np.uint8),
        pool=column(st.integers(0, pools - 1), np.int32) if pools else None,
        tensor=column(index_below(tensors, -1), np.int32) if tensors else None,
    )


@st.composite
def traces(draw):
    frames = tuple(
        draw(st.lists(st.builds(Frame, st.text(), st.integers(0, 1 << 31), st.text(), st.booleans())))
    )
    stack = st.lists(index_below(len(frames))).map(tuple) if frames else st.just(())
    stacks = tuple(draw(st.lists(stack, max_size=5)))
    label = st.builds(EventLabel, st.sampled_from(Phase), st.text(), st.text(), index_below(len(stacks), -1))
    labels = tuple(draw(st.lists(label, max_size=5)))
    with_pools = draw(st.booleans())
    private = st.lists(st.tuples(naturals, naturals).filter(any), max_size=3, unique=True)
    pools = ((0, 0), *draw(private)) if with_pools else ()
    shape = st.lists(naturals, max_size=3).map(tuple)
    tensors = tuple(draw(st.lists(st.builds(TensorInfo, st.text(), st.text(), st.text(), shape), max_size=3)))
    events = draw(columns(len(labels), len(stacks), len(pools), len(tensors)))
    mark = st.builds(Mark, st.integers(0, len(events)), st.sampled_from(MarkKind), naturals)
    segment = st.builds(
        Segment,
        naturals,
        naturals,
        naturals,
        st.text(),
        st.sampled_from(pools) if with_pools else st.tuples(naturals, naturals),
        expandable=st.booleans(),
        blocks=st.lists(blocks, max_size=3).map(tuple),
    )
    sizes = st.builds(BatchSize, naturals, st.lists(naturals, max_size=2).map(tuple))
    scans = st.builds(
        LoaderScan,
        st.text(),
        naturals,
        st.none() | naturals,
        st.text(),
        sizes,
        sizes,
        st.lists(sizes, max_size=3).map(tuple),
        st.none() | naturals,
    )
    texts = st.dictionaries(st.text(), st.text(), max_size=3)
    return Trace(
        events=events,
        labels=labels,
        stacks=stacks,
        frames=frames,
        marks=tuple(draw(st.lists(mark, max_size=3))),
        segments=tuple(draw(st.lists(segment, max_size=3))),
        device=draw(st.builds(DeviceUse, st.text(), figures, figures, naturals)),
        end=draw(st.builds(ScriptEnd, st.text(), st.integers(-255, 255), st.text(), st.text())),
        settings=draw(texts),
        statistics=draw(st.dictionaries(st.text(), st.integers(-LARGEST, LARGEST), max_size=3)),
        versions=draw(texts),
        command=tuple(draw(st.lists(st.text(), max_size=3))),
        notes=tuple(
            draw(st.lists(st.builds(Note, st.sampled_from(Provenance), st.text(), st.text()), max_size=3))
        ),
        pools=pools,
        tensors=tensors,
        scans=tuple(draw(st.lists(scans, max_size=2))),
    )


def assert_equal(left, right):
    for field in fields(Events):
        column, expected = getattr(left.events, field.name), getattr(right.events, field.name)
        if column is None or expected is None:
            assert column is expected
            continue
        assert column.dtype == expected.dtype
        np.testing.assert_array_equal(column, expected)
    for field in fields(Trace):
        if field.name != "events":
            assert getattr(left, field.name) == getattr(right, field.name)


# -- round trips -----------------------------------------------------------------------------------


@settings(deadline=None)  # a file is written to the disk each time
@given(traces())
def test_a_trace_round_trips_exactly(tmp_path_factory, trace):
    path = tmp_path_factory.getbasetemp() / "round.memfit"
    write_trace(trace, path)
    assert_equal(read_trace(path), trace)


def test_every_column_of_the_events_has_a_type_in_the_file():
    assert set(trace_file._COLUMNS) == {field.name for field in fields(Events)}


def test_equal_traces_make_equal_files(tmp_path, trace, file):
    copied = tmp_path / "copied.memfit"
    write_trace(trace, copied)
    assert copied.read_bytes() == file.read_bytes()


def test_a_name_that_is_not_utf8_gets_a_question_mark(tmp_path, trace):
    path = tmp_path / "run.memfit"
    write_trace(replace(trace, command=("caf\udce9.py",), settings={"a\udce9": "b"}), path)
    found = read_trace(path)
    assert found.command == ("caf?.py",)
    assert found.settings == {"a?": "b"}
    assert found.labels == trace.labels


def test_a_trace_is_distinguished_from_a_pickle(tmp_path, file):
    other = tmp_path / "other"
    other.write_bytes(b"\x80\x04}.")
    assert looks_like_trace_file(file)
    assert not looks_like_trace_file(other)
    with pytest.raises(FileFormatError, match="No such file"):
        looks_like_trace_file(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("version", "missing"), [(1, {"pool": "pools", "tensor": "tensors"}), (2, {"tensor": "tensors"})]
)
def test_a_file_of_an_earlier_version_is_read(file, trace, version, missing):
    """Such a file lacks the columns added later, and their tables."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(members["header.json"]) | {"version": version}
    for column, table in missing.items():
        del header[table], members[f"columns/{column}"]
    members["header.json"] = json.dumps(header).encode()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    without = replace(trace.events, **dict.fromkeys(missing))
    assert_equal(read_trace(file), replace(trace, events=without, **dict.fromkeys(missing.values(), ())))


# -- writing ---------------------------------------------------------------------------------------


def test_the_file_mode_follows_the_umask(tmp_path, trace):
    before = os.umask(0o027)
    try:
        write_trace(trace, tmp_path / "run.memfit")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run.memfit").stat().st_mode) == 0o640


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path, trace, file, monkeypatch):
    old = file.read_bytes()

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"Cannot write .*run\.memfit: No space left on device"):
        write_trace(trace, file)
    assert file.read_bytes() == old
    assert list(tmp_path.iterdir()) == [file]


def test_an_interrupted_write_leaves_no_file(tmp_path, trace, monkeypatch):
    def interrupt(_descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_trace(trace, tmp_path / "run.memfit")
    assert list(tmp_path.iterdir()) == []


def test_paths_that_cannot_be_written_are_refused(tmp_path, trace):
    for path, error, words in [
        (tmp_path / "none" / "run.memfit", OutputError, "No such file or directory"),
        (tmp_path, UsageError, "not a regular file"),
        (Path("/dev/null"), UsageError, "not a regular file"),
    ]:
        with pytest.raises(error, match=f"Cannot write {re.escape(str(path))}: .*{words}"):
            write_trace(trace, path)


def test_a_trace_that_is_too_long_is_not_written(tmp_path, trace, monkeypatch):
    path = tmp_path / "run.memfit"
    monkeypatch.setattr(trace_limits, "MAX_EVENTS", 1)
    with pytest.raises(UsageError, match=r"the run has 2 events, but a trace can have at most 1. Run"):
        write_trace(trace, path)
    monkeypatch.undo()
    monkeypatch.setattr(trace_limits, "MAX_ROWS", 1)
    with pytest.raises(UsageError, match=r"the run has 2 pools, but a trace can have at most 1. Run"):
        write_trace(trace, path)
    monkeypatch.undo()
    monkeypatch.setattr(trace_file, "MAX_HEADER_BYTES", 100)
    with pytest.raises(UsageError, match=r"the trace take [\d,]+ bytes, but .* at most 100. Run"):
        write_trace(trace, path)
    assert not path.exists()


def test_long_texts_are_cut_so_that_the_trace_can_be_read(tmp_path, trace):
    long = "é" * (MAX_TEXT + 1)
    label, frame, tensor = trace.labels[0], trace.frames[0], trace.tensors[0]
    shapes = {
        "labels": (replace(label, module=long, op=long),),
        "frames": (replace(frame, file=long, function=long),),
        "tensors": (replace(tensor, module=long, name=long, dtype=long),),
        "notes": (Note(Provenance.EXACT, long, long),),
        "end": ScriptEnd("exception", 1, long, long),
        "command": ("train.py", long),
        "settings": {"conf": long},
        "versions": {long: long},
        "device": replace(trace.device, name=long),
    }
    for name, value in shapes.items():
        path = tmp_path / "run.memfit"
        write_trace(replace(trace, **{name: value}), path)
        found = str(getattr(read_trace(path), name))
        assert "é" * (MAX_TEXT - 1) + "…" in found, name
        assert "é" * MAX_TEXT not in found
    write_trace(replace(trace, command=("é" * MAX_TEXT,)), path)
    assert read_trace(path).command == ("é" * MAX_TEXT,)
