"""Files that are not complete, consistent traces: each is refused with a specific message."""

import io
import struct
import zipfile
from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest

from memfit.errors import FileFormatError
from memfit.records import Events, Segment, SnapshotBlock
from memfit.trace import trace_file
from memfit.trace.trace_file import read_trace, write_trace


def assert_equal_events(left, right):
    for field in fields(Events):
        np.testing.assert_array_equal(getattr(left.events, field.name), getattr(right.events, field.name))


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


def test_a_missing_file_a_folder_and_an_unreadable_file_are_refused(tmp_path, file, monkeypatch):
    assert "No such file or directory" in refused(tmp_path / "nowhere.memfit")
    assert "Is a directory" in refused(tmp_path)

    def denied(*_arguments, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(file), "open", denied)
    assert "Permission denied" in refused(file)


SCAN = {"where": "", "seen": 2, "of": None, "ended": "pass", "served": [], "dimension": None}
SCAN |= {name: {"bytes": 1, "shape": []} for name in ("largest", "median")}


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06", b"some text\n" * 100, b"\x80\x04}."])
def test_files_of_other_formats_are_refused(tmp_path, content):
    path = tmp_path / "foreign"
    path.write_bytes(content)
    assert "not a memfit trace" in refused(path)


def test_a_trace_truncated_anywhere_is_refused(file):
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        refused(file)


@pytest.mark.slow
def test_changing_any_byte_never_yields_another_trace(file, trace):
    """A changed file is refused, unless the zip format ignores the changed byte."""
    whole = file.read_bytes()
    for position in range(len(whole)):
        file.write_bytes(whole[:position] + bytes((whole[position] ^ 0x55,)) + whole[position + 1 :])
        try:
            found = read_trace(file)
        except FileFormatError:
            continue
        assert_equal_events(found, trace)
        assert replace(found, events=trace.events) == trace


def test_other_zips_are_refused(file):
    with zipfile.ZipFile(file, "w") as archive:
        for number in range(9):
            archive.writestr(f"{number}.txt", "x")
    assert "holds '0.txt'" in refused(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x", "x")
    assert "zip file with 1 members" in refused(file)


def test_a_missing_or_an_extra_member_is_refused(file, trace):
    assert "12 members" in refused(rewritten(file, lambda members: members | {"extra": b""}))
    write_trace(trace, file)
    members = {"columns/actiom": b""}
    renamed = rewritten(
        file, lambda found: {name: found[name] for name in found if name != "columns/action"} | members
    )
    assert "do not match its header" in refused(renamed)


def test_unknown_formats_and_versions_are_refused(file, trace):
    assert "has version 7, but this memfit reads only up to version 6. Upgrade" in refused(
        with_header(file, version=7)
    )
    write_trace(trace, file)
    assert "has the unknown format version 0" in refused(with_header(file, version=0))
    write_trace(trace, file)
    assert "not a memfit trace; its format is 'other'" in refused(with_header(file, format="other"))


@pytest.mark.parametrize(
    "header",
    [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"format":' + b"[" * 100_000, b'{"version": 1e400}'],
)
def test_damaged_headers_are_refused(file, header):
    assert "header" in refused(rewritten(file, lambda members: members | {"header.json": header}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"events": 3}, "columns/action has 2 bytes, but its 3 events need 3 bytes"),
        ({"events": -1}, "declares -1 events"),
        ({"events": 1 << 40}, "declares 1,099,511,627,776 events"),
        ({"labels": []}, "event 0 of 2 has label 0,"),
        ({"stacks": []}, "event 1 of 2 has stack 0,"),
        ({"frames": []}, "a stack's frame"),
        ({"pools": [[0, 0]]}, "has pool "),
        ({"tensors": [{"module": "", "name": "", "dtype": "", "shape": [-1]}]}, "a tensor's dimension"),
        ({"tensors": []}, "its columns do not match its header"),
        ({"pools": [[1, 0], [0, 0]]}, "its first pool is not the default pool"),
        ({"pools": [[0, 0], [1, -1]]}, "a pool's number"),
        ({"pools": [[0, 0], [1, 2, 3]]}, "header"),
        ({"stacks": [[-1]]}, "a stack's frame"),
        ({"labels": [{"phase": "forward", "module": "", "op": "", "stack": 1}]}, "a label's stack"),
        ({"labels": [{"phase": "lunch", "module": "", "op": "", "stack": 0}]}, "lunch"),
        ({"marks": [{"position": 3, "kind": "forward", "index": 0}]}, "a mark's position"),
        ({"marks": [{"position": 0, "kind": "forward", "index": -1}]}, "a mark's index"),
        ({"frames": [{"file": "f", "line": 10**30, "function": "", "user": True}]}, "a frame's line"),
        ({"statistics": {"x": 10**30}}, "a statistic"),
        ({"statistics": {"x": 0.5}}, "header"),
        ({"stacks": {"a": 1}}, "header"),
        ({"options": [{"purpose": "batch size", "words": ["-b"], "value": -1}]}, "an option's value"),
        ({"options": [{"purpose": "lunch", "words": [], "value": 1}]}, "lunch"),
        ({"loader": {"size": 0, "line": ""}}, "the loader's batch size"),
        ({"scans": [SCAN | {"of": -1}]}, "a scan's number"),
        ({"scans": [SCAN | {"median": {"bytes": 1, "shape": [-1]}}]}, "a scan's number"),
        ({"scans": [SCAN | {"served": [{"bytes": 10**30, "shape": []}]}]}, "a scan's number"),
        ({"scans": [SCAN | {"ended": "x" * 5000}]}, "contains a text of 5,000 characters"),
        ({"scans": [SCAN] * 1025}, "has 1,025 scans, but a trace can have at most 1,024."),
        ({"rank": {"rank": 0, "world_size": 1}}, "the number of ranks"),
        ({"rank": {"rank": 8, "world_size": 8}}, "the rank"),
        ({"rank": {"rank": -1, "world_size": 8}}, "the rank"),
        (
            {"labels": [{"phase": "forward", "module": "x" * 4_000_000, "op": "", "stack": 0}]},
            "contains a text of 4,000,000 characters, but at most 4,096 are allowed.",
        ),
        (
            {"marks": [{"position": 0, "kind": "forward", "index": 0}] * 1_100_000},
            "has 1,100,000 marks, but a trace can have at most 1,048,576.",
        ),
    ],
)
def test_inconsistent_headers_are_refused(file, change, words):
    assert words in refused(with_header(file, **change))


def test_segments_out_of_range_are_refused(file, trace):
    block = SnapshotBlock(0, -1, 0, "inactive")
    segment = Segment(0, 1, 0, "large", (0, 0), expandable=False, blocks=(block,))
    write_trace(replace(trace, segments=(segment,)), file)
    assert "a segment's number" in refused(file)
    strange = replace(segment, blocks=(replace(block, size=1, state="gone"),))
    write_trace(replace(trace, segments=(strange,)), file)
    assert "a block's state is not one of inactive" in refused(file)
    elsewhere = replace(segment, pool=(7, 0), blocks=())
    write_trace(replace(trace, segments=(elsewhere,)), file)
    assert "a segment's pool is not among the trace's pools" in refused(file)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("action", 11, "event 1 of 2 has action 11, not between 0 and 10"),
        ("category", 14, "event 1 of 2 has category 14,"),
        ("size", -1, "event 1 of 2 has size -1,"),
        ("address", 1 << 63, "event 1 of 2 has address 9223372036854775808,"),
        ("stream", -1, "event 1 of 2 has stream -1,"),
        ("label", -2, "event 1 of 2 has label -2,"),
        ("stack", 1, "event 1 of 2 has stack 1,"),
        ("pool", 2, "has pool "),
        ("tensor", 1, "event 1 of 2 has tensor 1,"),
    ],
)
def test_columns_out_of_range_are_refused(file, trace, column, value, words):
    values = getattr(trace.events, column).copy()
    values[1] = value
    write_trace(replace(trace, events=replace(trace.events, **{column: values})), file)
    assert words in refused(file)


def test_a_zip_bomb_is_not_decompressed(file, monkeypatch):
    """Declared sizes are checked first: this test fails if a member of the wrong size is read."""

    def bomb(members):
        return members | {"columns/size": b"\0" * (1 << 28)}

    rewritten(file, bomb)
    assert file.stat().st_size < 1 << 20
    read = zipfile.ZipFile.read

    def only_the_header(self, member):
        assert member.filename == "header.json"
        return read(self, member)

    monkeypatch.setattr(zipfile.ZipFile, "read", only_the_header)
    assert "columns/size has 268,435,456 bytes, but its 2 events need 16 bytes" in refused(file)
    monkeypatch.setattr(trace_file, "MAX_HEADER_BYTES", 10)
    monkeypatch.setattr(zipfile.ZipFile, "read", None)
    assert "declares" in refused(file)
    monkeypatch.setattr(trace_file, "MAX_BYTES", 10)
    monkeypatch.setattr(zipfile, "ZipFile", None)
    assert "and memfit reads such files only up to 10 bytes" in refused(file)


def test_a_wrong_declared_size_fails_the_checksum(file):
    """A member that declares fewer bytes than it holds is refused."""
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
    # Neither a forged number of entries nor a zip64 end record gets past the check.
    content = bytearray(buffer.getvalue())
    content[-14:-10] = struct.pack("<HH", 9, 9)
    file.write_bytes(content)
    assert "not a memfit trace" in refused(file)
    end = struct.pack("<4s4xHHI4xH", b"PK\x05\x06", 9, 9, 100, 0)
    file.write_bytes(b"PK\x06\x07" + b"\0" * 16 + end)
    assert "not a memfit trace" in refused(file)


def test_encrypted_and_unusually_compressed_members_are_refused(file):
    content = bytearray(file.read_bytes())
    directory = content.index(b"PK\x01\x02")
    content[directory + 8] |= 1
    file.write_bytes(content)
    assert "damaged" in refused(file)
    content[directory + 8] &= 0xFE
    content[directory + 10] = 99
    file.write_bytes(content)
    assert "damaged" in refused(file)
