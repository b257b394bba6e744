"""Trace files: exact round trips, and a clear refusal of everything that is not a whole trace."""

import io
import os
import re
import stat
import struct
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.capture import tracefile
from memfit.capture.tracefile import is_trace, read_trace, write_trace
from memfit.errors import FileFormatError, UsageError
from memfit.records import (
    Action,
    Block,
    Category,
    DeviceUse,
    Events,
    Figure,
    Frame,
    Label,
    Mark,
    MarkKind,
    Note,
    Phase,
    Provenance,
    ScriptEnd,
    Segment,
    Trace,
)

LARGEST = (1 << 63) - 1

# -- random traces ---------------------------------------------------------------------------------

naturals = st.integers(0, LARGEST)
figures = st.builds(Figure, naturals, st.sampled_from(Provenance), st.text())
blocks = st.builds(Block, naturals, naturals, naturals, st.sampled_from(tracefile.BLOCK_STATES))


def index_below(count, lowest=0):
    return st.integers(lowest, count - 1)


@st.composite
def columns(draw, labels, stacks):
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
    )


@st.composite
def traces(draw):
    frames = tuple(
        draw(st.lists(st.builds(Frame, st.text(), st.integers(0, 1 << 31), st.text(), st.booleans())))
    )
    stack = st.lists(index_below(len(frames))).map(tuple) if frames else st.just(())
    stacks = tuple(draw(st.lists(stack, max_size=5)))
    label = st.builds(Label, st.sampled_from(Phase), st.text(), st.text(), index_below(len(stacks), -1))
    labels = tuple(draw(st.lists(label, max_size=5)))
    events = draw(columns(len(labels), len(stacks)))
    mark = st.builds(Mark, st.integers(0, len(events)), st.sampled_from(MarkKind), naturals)
    segment = st.builds(
        Segment,
        naturals,
        naturals,
        naturals,
        st.text(),
        st.tuples(naturals, naturals),
        expandable=st.booleans(),
        blocks=st.lists(blocks, max_size=3).map(tuple),
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
    )


def assert_equal(one, other):
    for field in fields(Events):
        left, right = getattr(one.events, field.name), getattr(other.events, field.name)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    for field in fields(Trace):
        if field.name != "events":
            assert getattr(one, field.name) == getattr(other, field.name)


# -- round trips -----------------------------------------------------------------------------------


@settings(deadline=None)  # a file is written to the disk each time
@given(traces())
def test_a_trace_comes_back_exactly(tmp_path_factory, trace):
    path = tmp_path_factory.getbasetemp() / "round.memfit"
    write_trace(trace, path)
    assert_equal(read_trace(path), trace)


@pytest.fixture
def trace():
    """Two events, and one of everything they refer to."""
    events = Events(
        action=np.array([Action.SEGMENT_ALLOC, Action.ALLOC], np.uint8),
        address=np.array([1 << 45, 1 << 45], np.uint64),
        size=np.array([2 << 20, 100], np.int64),
        stream=np.array([0, 0], np.int32),
        time=np.array([1, 2], np.int64),
        label=np.array([0, 0], np.int32),
        stack=np.array([-1, 0], np.int32),
        category=np.array([0, Category.PARAMETER], np.uint8),
    )
    figure = Figure(1 << 30, Provenance.EXACT, "here")
    return Trace(
        events=events,
        labels=(Label(Phase.FORWARD, "layers.0", "", 0),),
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
    )


@pytest.fixture
def file(tmp_path, trace):
    path = tmp_path / "run.memfit"
    write_trace(trace, path)
    return path


def test_the_header_holds_every_field():
    in_header = set(tracefile._Header.__struct_fields__) - {"format", "version"}
    assert in_header == {field.name for field in fields(Trace)} - {"events"} | {"events"}
    assert set(tracefile._COLUMNS) == {field.name for field in fields(Events)}


def test_equal_traces_make_equal_files(tmp_path, trace, file):
    again = tmp_path / "again.memfit"
    write_trace(trace, again)
    assert again.read_bytes() == file.read_bytes()


def test_a_name_that_is_not_utf8_gets_a_question_mark(tmp_path, trace):
    path = tmp_path / "run.memfit"
    write_trace(replace(trace, command=("caf\udce9.py",), settings={"a\udce9": "b"}), path)
    found = read_trace(path)
    assert found.command == ("caf?.py",)
    assert found.settings == {"a?": "b"}
    assert found.labels == trace.labels


def test_a_trace_is_told_from_a_pickle(tmp_path, file):
    other = tmp_path / "other"
    other.write_bytes(b"\x80\x04}.")
    assert is_trace(file)
    assert not is_trace(other)
    with pytest.raises(FileFormatError, match="No such file"):
        is_trace(tmp_path / "nowhere")


# -- writing ---------------------------------------------------------------------------------------


def test_the_umask_decides_the_mode(tmp_path, trace):
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
    with pytest.raises(UsageError, match=r"Cannot write .*run\.memfit: No space left on device"):
        write_trace(trace, file)
    assert file.read_bytes() == old
    assert list(tmp_path.iterdir()) == [file]


def test_an_interrupt_leaves_nothing_either(tmp_path, trace, monkeypatch):
    def interrupt(_descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_trace(trace, tmp_path / "run.memfit")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_to(tmp_path, trace):
    for path, words in [
        (tmp_path / "none" / "run.memfit", "No such file or directory"),
        (tmp_path, "not an ordinary file"),
        (Path("/dev/null"), "not an ordinary file"),
    ]:
        with pytest.raises(UsageError, match=f"Cannot write {re.escape(str(path))}: .*{words}"):
            write_trace(trace, path)


def test_a_trace_too_long_is_not_written(tmp_path, trace, monkeypatch):
    monkeypatch.setattr(tracefile, "MAX_EVENTS", 1)
    with pytest.raises(UsageError, match="at most 1 events, this one has 2"):
        write_trace(trace, tmp_path / "run.memfit")


# -- files that are not traces ---------------------------------------------------------------------


def refused(path):
    with pytest.raises(FileFormatError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"Cannot read {path}: ")
    return message


def rewritten(path, change):
    """Replace members of a trace file: change takes and returns {name: bytes}."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in change(members).items():
            archive.writestr(name, content)
    return path


def with_header(path, **changes):
    def change(members):
        header = msgspec.json.decode(members["header.json"])
        return members | {"header.json": msgspec.json.encode(header | changes)}

    return rewritten(path, change)


def test_no_file_a_folder_and_no_permission(tmp_path, file, monkeypatch):
    assert "No such file or directory" in refused(tmp_path / "nowhere.memfit")
    assert "Is a directory" in refused(tmp_path)

    def denied(*_arguments, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(file), "open", denied)
    assert "Permission denied" in refused(file)


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06", b"some text\n" * 100, b"\x80\x04}."])
def test_foreign_files(tmp_path, content):
    path = tmp_path / "foreign"
    path.write_bytes(content)
    assert "not a memfit trace" in refused(path)


def test_a_trace_cut_off_anywhere(file):
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        refused(file)


def test_a_trace_with_any_byte_changed(file, trace):
    """No change passes for another trace: it is refused, or it lies where the zip says nothing."""
    whole = file.read_bytes()
    for position in range(len(whole)):
        file.write_bytes(whole[:position] + bytes((whole[position] ^ 0x55,)) + whole[position + 1 :])
        try:
            found = read_trace(file)
        except FileFormatError:
            continue
        assert_equal(found, trace)


def test_another_zip(file):
    with zipfile.ZipFile(file, "w") as archive:
        for number in range(9):
            archive.writestr(f"{number}.txt", "x")
    assert "holds '0.txt'" in refused(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x", "x")
    assert "zip of 1 members" in refused(file)


def test_a_member_more_or_less(file, trace):
    assert "10 members" in refused(rewritten(file, lambda members: members | {"extra": b""}))
    write_trace(trace, file)
    members = {"columns/actiom": b""}
    renamed = rewritten(
        file, lambda found: {name: found[name] for name in found if name != "columns/action"} | members
    )
    assert "not a memfit trace" in refused(renamed)


def test_another_version(file, trace):
    assert "newer memfit (version 2; this one reads 1). Upgrade" in refused(with_header(file, version=2))
    write_trace(trace, file)
    assert "never was (0)" in refused(with_header(file, version=0))
    write_trace(trace, file)
    assert "not a memfit trace but 'other'" in refused(with_header(file, format="other"))


@pytest.mark.parametrize(
    "header",
    [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"format":' + b"[" * 100_000, b'{"version": 1e400}'],
)
def test_headers_that_are_none(file, header):
    assert "header" in refused(rewritten(file, lambda members: members | {"header.json": header}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"events": 3}, "columns/action has 2 bytes where 3 events make 3"),
        ({"events": -1}, "declares -1 events"),
        ({"events": 1 << 40}, "declares 1,099,511,627,776 events"),
        ({"labels": []}, "an event's label"),
        ({"stacks": []}, "an event's stack"),
        ({"frames": []}, "a stack's frame"),
        ({"stacks": [[-1]]}, "a stack's frame"),
        ({"labels": [{"phase": "forward", "module": "", "op": "", "stack": 1}]}, "a label's stack"),
        ({"labels": [{"phase": "lunch", "module": "", "op": "", "stack": 0}]}, "lunch"),
        ({"marks": [{"position": 3, "kind": "forward", "index": 0}]}, "a mark's position"),
        ({"marks": [{"position": 0, "kind": "forward", "index": -1}]}, "a mark's index"),
        ({"frames": [{"file": "f", "line": 10**30, "function": "", "user": True}]}, "a frame's line"),
        ({"statistics": {"x": 10**30}}, "a statistic"),
        ({"statistics": {"x": 0.5}}, "header"),
        ({"stacks": {"a": 1}}, "header"),
    ],
)
def test_headers_that_contradict(file, change, words):
    assert words in refused(with_header(file, **change))


def test_segments_out_of_range(file, trace):
    block = Block(0, -1, 0, "inactive")
    segment = Segment(0, 1, 0, "large", (0, 0), expandable=False, blocks=(block,))
    write_trace(replace(trace, segments=(segment,)), file)
    assert "a segment's number" in refused(file)
    strange = replace(segment, blocks=(replace(block, size=1, state="gone"),))
    write_trace(replace(trace, segments=(strange,)), file)
    assert "a block's state is none of inactive" in refused(file)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("action", 10, "an action"),
        ("category", 5, "a category"),
        ("size", -1, "an event's size"),
        ("address", 1 << 63, "an event's address"),
        ("stream", -1, "an event's stream"),
        ("label", -2, "an event's label"),
        ("stack", 1, "an event's stack"),
    ],
)
def test_columns_out_of_range(file, trace, column, value, words):
    values = getattr(trace.events, column).copy()
    values[1] = value
    write_trace(replace(trace, events=replace(trace.events, **{column: values})), file)
    assert words in refused(file)


def test_a_bomb_is_not_opened(file, monkeypatch):
    """What is declared is checked first: reading a member of the wrong size would fail this test."""

    def bomb(members):
        return members | {"columns/size": b"\0" * (1 << 28)}

    rewritten(file, bomb)
    assert file.stat().st_size < 1 << 20
    read = zipfile.ZipFile.read

    def only_the_header(self, member):
        assert member.filename == "header.json"
        return read(self, member)

    monkeypatch.setattr(zipfile.ZipFile, "read", only_the_header)
    assert "columns/size has 268,435,456 bytes where 2 events make 16" in refused(file)
    monkeypatch.setattr(tracefile, "MAX_HEADER_BYTES", 10)
    monkeypatch.setattr(zipfile.ZipFile, "read", None)
    assert "declares" in refused(file)


def test_a_size_that_lies(file):
    """A member that declares fewer bytes than it holds fails its checksum."""
    rewritten(file, lambda members: members | {"columns/size": b"\1" * 1000})
    content = file.read_bytes()
    assert content.count(struct.pack("<I", 1000)) >= 1
    file.write_bytes(content.replace(struct.pack("<I", 1000), struct.pack("<I", 16)))
    assert "damaged" in refused(file)


def test_a_directory_as_large_as_the_file_is_not_read(file, monkeypatch):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number in range(2000):
            archive.writestr(str(number), "")
    file.write_bytes(buffer.getvalue())
    monkeypatch.setattr(zipfile, "ZipFile", None)
    assert "not a memfit trace" in refused(file)
    # A forged number of entries does not help, nor does the end that zips beyond 4 GiB have.
    content = bytearray(buffer.getvalue())
    content[-14:-10] = struct.pack("<HH", 9, 9)
    file.write_bytes(content)
    assert "not a memfit trace" in refused(file)
    end = struct.pack("<4s4xHHI4xH", b"PK\x05\x06", 9, 9, 100, 0)
    file.write_bytes(b"PK\x06\x07" + b"\0" * 16 + end)
    assert "not a memfit trace" in refused(file)


def test_encrypted_and_strangely_compressed_members(file):
    content = bytearray(file.read_bytes())
    directory = content.index(b"PK\x01\x02")
    content[directory + 8] |= 1
    file.write_bytes(content)
    assert "damaged" in refused(file)
    content[directory + 8] &= 0xFE
    content[directory + 10] = 99
    file.write_bytes(content)
    assert "damaged" in refused(file)
