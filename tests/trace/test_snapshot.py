"""PyTorch's memory snapshots: real ones, those of other versions, and forged ones."""

import json
import pickle
import re
import subprocess
import sys
from collections import OrderedDict
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from memfit.allocator.config import AllocatorConfig
from memfit.allocator.reconstruct_initial_state import reconstruct_initial_state
from memfit.allocator.timeline import memory_timeline, timeline_disagreement_with_pytorch
from memfit.errors import FileFormatError, OutputError
from memfit.records import Action, EventLabel, Events, Phase, Trace
from memfit.trace import snapshot as snapshots
from memfit.trace.snapshot import allocator_settings, read_snapshot, snapshot_of_trace, write_snapshot
from memfit.trace.trace_file import read_trace, write_trace

DRIVER = Path(__file__).parents[1] / "allocator" / "drive_allocator.py"
BASE = 1 << 45
MIB = 1 << 20


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Return a snapshot by PyTorch on the ghost: random tensors, streams and three training steps."""
    out = tmp_path_factory.mktemp("real") / "out.pickle"
    options = {"operations": 300, "training_steps": 3, "streams": 2, "share": 0.2, "seed": 5}
    command = [sys.executable, str(DRIVER), str(out), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return pickle.loads(out.read_bytes())  # noqa: S301  the driver wrote it


def saved(folder, snapshot):
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    return path


def small(**changes):
    """Return a minimal snapshot."""
    event = {"action": "alloc", "addr": BASE, "size": 100, "stream": 0, "time_us": 1, "frames": []}
    segment = {"action": "segment_alloc", "addr": BASE, "size": 2 * MIB, "stream": 0}
    blocks = [{"size": 512, "state": "active_allocated"}, {"size": 2 * MIB - 512, "state": "inactive"}]
    final_segment = {
        "address": BASE,
        "total_size": 2 * MIB,
        "stream": 0,
        "segment_type": "small",
        "blocks": blocks,
    }
    return {"segments": [final_segment], "device_traces": [[segment, event]]} | changes


def assert_equal(left, right):
    for field in fields(Events):
        np.testing.assert_array_equal(getattr(left.events, field.name), getattr(right.events, field.name))
    for field in fields(Trace):
        if field.name != "events":
            assert getattr(left, field.name) == getattr(right, field.name)


# -- written by PyTorch -----------------------------------------------------------------------------


@pytest.mark.process
def test_a_real_snapshot_is_read_to_the_byte(tmp_path, real):
    trace = read_snapshot(saved(tmp_path, real["snapshot"]))
    referee = replace(trace, statistics=real["statistics"])
    assert timeline_disagreement_with_pytorch(referee, memory_timeline(trace)) == ""
    for name in ("allocated", "reserved"):
        key = f"{name}_bytes.all.current"
        assert trace.statistics[key] == real["statistics"][key]
    assert {Path(frame.file).name for frame in trace.frames} == {"drive_allocator.py"}
    stacks = trace.events.stack[trace.events.action == Action.ALLOC]
    assert (stacks >= 0).any()
    assert trace.events.stream.max() == 1


@pytest.mark.process
def test_a_real_snapshot_round_trips(tmp_path, real):
    trace = read_snapshot(saved(tmp_path, real["snapshot"]))
    copied = tmp_path / "copied.pickle"
    write_snapshot(trace, copied)
    assert_equal(read_snapshot(copied), trace)
    as_trace = tmp_path / "run.memfit"
    write_trace(trace, as_trace)
    assert_equal(read_trace(as_trace), trace)


@pytest.mark.process
@pytest.mark.parametrize("kept", [0, 1, 100, 600])
def test_blocks_older_than_the_history_are_prepended_to_it(real, kept):
    """With them, a truncated history has the same bytes and final blocks as the whole one."""
    snapshot = real["snapshot"]
    events = snapshot["device_traces"][0]
    cut = snapshot | {"device_traces": [events[len(events) - kept :]]}
    whole, completed = (
        snapshots.trace_of_snapshot(snapshot),
        snapshots.trace_of_snapshot(snapshots.with_blocks_before_history(cut)),
    )
    earlier = int((completed.events.action == Action.EARLIER).sum())
    assert len(completed.events) == earlier + kept
    assert (completed.events.action[:earlier] == Action.EARLIER).all()
    line, expected = memory_timeline(completed), memory_timeline(whole)
    np.testing.assert_array_equal(line.reserved[earlier:], expected.reserved[len(events) - kept :])
    spare = reconstruct_initial_state(completed, AllocatorConfig.read(completed.settings)).uncertain
    short = expected.allocated[len(events) - kept :] - line.allocated[earlier:]
    assert short.min(initial=0) >= 0
    assert short.max(initial=0) <= spare

    def left(trace, line):
        born = np.isin(trace.events.action, (Action.ALLOC, Action.EARLIER))
        remaining = born & (line.freed_by == len(trace.events))
        columns = trace.events.address, trace.events.size, line.block_size
        return sorted(zip(*(column[remaining].tolist() for column in columns), strict=True))

    assert left(completed, line) == left(whole, expected)


@pytest.mark.process
def test_pytorchs_own_tools_read_our_snapshot_like_the_original(tmp_path, real):
    memory_viz = pytest.importorskip("torch.cuda._memory_viz")
    theirs, ours = real["snapshot"], tmp_path / "ours.pickle"
    write_snapshot(read_snapshot(saved(tmp_path, theirs)), ours)
    ours = pickle.loads(ours.read_bytes())  # noqa: S301  as those tools do
    assert memory_viz.trace(ours) == memory_viz.trace(theirs)
    without_handles = re.compile(r"stream_\d+")
    assert without_handles.sub("", memory_viz.segsum(ours)) == without_handles.sub(
        "", memory_viz.segsum(theirs)
    )
    assert "drive_allocator.py" in memory_viz.memory(ours, format_flamegraph=str)
    assert "add_local_files" in memory_viz.trace_plot(ours)


@pytest.mark.process
def test_a_snapshot_without_the_keys_that_early_versions_lack_is_read(tmp_path, real):
    early = pickle.loads(pickle.dumps(real["snapshot"]))  # noqa: S301  a deep copy
    for event in early["device_traces"][0]:
        for key in ("compile_context", "user_metadata", "pool_id", "time_us"):
            event.pop(key, None)
    for segment in early["segments"]:
        for key in ("is_expandable", "segment_pool_id", "requested_size", "frames"):
            segment.pop(key, None)
        for block in segment["blocks"]:
            block.pop("address", None)
            block.pop("frames", None)
    for key in ("allocator_settings", "external_annotations", "host_segments", "host_traces"):
        early.pop(key, None)
    trace = read_snapshot(saved(tmp_path, early))
    now = read_snapshot(saved(tmp_path, real["snapshot"]))
    assert (
        timeline_disagreement_with_pytorch(
            replace(trace, statistics=real["statistics"]), memory_timeline(trace)
        )
        == ""
    )
    assert [s.blocks for s in trace.segments] == [s.blocks for s in now.segments]
    assert now.events.pool is not None
    assert trace.events.pool is None


# -- handmade ---------------------------------------------------------------------------------------


def test_a_minimal_snapshot_is_read(tmp_path):
    trace = read_snapshot(saved(tmp_path, small()))
    assert memory_timeline(trace).allocated.tolist() == [0, 512]
    assert trace.settings == {"conf": ""}
    assert trace.segments[0].blocks[1].address == BASE + 512


def test_every_pickle_protocol_of_plain_data_is_read(tmp_path):
    path = tmp_path / "snapshot.pickle"
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(small(), protocol))
        assert len(read_snapshot(path).events) == 2


def test_the_requested_device_is_read(tmp_path):
    snapshot = small()
    other = {**snapshot["segments"][0], "device": 1, "address": 2 * BASE}
    history = [{**event, "addr": 2 * BASE} for event in snapshot["device_traces"][0][:1]]
    snapshot["segments"].insert(0, other)
    snapshot["device_traces"] += [history, []]
    path = saved(tmp_path, snapshot)
    first, second = read_snapshot(path), read_snapshot(path, device=1)
    assert (len(first.events), len(second.events)) == (2, 1)
    assert (first.segments[0].address, second.segments[0].address) == (BASE, 2 * BASE)
    for device in (2, 3, -1):
        with pytest.raises(FileFormatError, match=rf"no allocator history for device {device} .*: 0, 1\)"):
            read_snapshot(path, device)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("active_allocated", "active_allocated"),
        ("active_pending_free", "active_awaiting_free"),
        ("active_awaiting_free", "active_awaiting_free"),
        ("inactive", "inactive"),
    ],
)
def test_both_spellings_of_a_blocks_state_are_read(tmp_path, written, read):
    snapshot = small()
    snapshot["segments"][0]["blocks"] = [{"size": 2 * MIB, "state": written}]
    trace = read_snapshot(saved(tmp_path, snapshot))
    assert trace.segments[0].blocks[0].state == read
    states = [
        block["state"] for segment in snapshot_of_trace(trace)["segments"] for block in segment["blocks"]
    ]
    assert states == ["active_pending_free" if read == "active_awaiting_free" else read]


def test_labels_are_written_as_readable_metadata(tmp_path):
    trace = read_snapshot(saved(tmp_path, small()))
    events = replace(trace.events, label=np.array([-1, 0], np.int32))
    labelled = replace(
        trace, events=events, labels=(EventLabel(Phase.BACKWARD, "layers.0", "MmBackward0", -1),)
    )
    history = snapshot_of_trace(labelled)["device_traces"][0]
    assert [event["user_metadata"] for event in history] == ["", "backward layers.0 MmBackward0"]


def test_an_oom_round_trips(tmp_path):
    snapshot = small()
    failed = {"action": "oom", "device_free": 77, "size": 1 << 40, "stream": 0, "time_us": 3}
    snapshot["device_traces"][0].append(failed)
    trace = read_snapshot(saved(tmp_path, snapshot))
    assert trace.events.address.tolist()[-1] == 77
    assert snapshot_of_trace(trace)["device_traces"][0][-1]["device_free"] == 77
    write_snapshot(trace, str(tmp_path / "copied"))
    assert_equal(read_snapshot(tmp_path / "copied"), trace)


@pytest.mark.parametrize(
    ("in_force", "found"),
    [
        ({}, {"conf": ""}),
        ({"max_split_size": -1, "garbage_collection_threshold": 0.0}, {"conf": ""}),
        ({"expandable_segments": True}, {"conf": "", "expandable_segments": "True"}),
        ({"garbage_collection_threshold": 0.5}, {"conf": "", "garbage_collection_threshold": "0.5"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:9", "max_split_size": 8 * MIB},
            {"conf": "max_split_size_mb:9", "max_split_size_mb": "8"},
        ),
        (
            {"roundup_power2_divisions": {"1": 0, "2": 4}},
            {"conf": "", "roundup_power2_divisions": "[1:0,2:4]"},
        ),
        ({"roundup_power2_divisions": {"1": 0, "2": 0}}, {"conf": ""}),
    ],
)
def test_settings_round_trip(tmp_path, in_force, found):
    snapshot = small(allocator_settings=in_force)
    assert allocator_settings(snapshot) == found
    trace = read_snapshot(saved(tmp_path, snapshot))
    assert allocator_settings(snapshot_of_trace(trace)) == found


def test_settings_without_a_key_in_pytorch_go_into_the_string(tmp_path):
    trace = replace(read_snapshot(saved(tmp_path, small())), settings={"conf": "a:1", "backend": "native"})
    assert allocator_settings(snapshot_of_trace(trace)) == {"conf": "a:1,backend:native"}


# -- files that are not snapshots -------------------------------------------------------------------


def refused(path):
    with pytest.raises(FileFormatError) as caught:
        read_snapshot(path)
    assert str(caught.value).startswith(f"Cannot read {path}: ")
    return str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    assert "No such file or directory" in refused(tmp_path / "nowhere")
    assert "Is a directory" in refused(tmp_path)


def test_a_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "MAX_BYTES", 10)
    assert "only up to 10 bytes. Record fewer events: pass max_entries" in refused(saved(tmp_path, small()))


def test_a_pickle_with_code_is_refused(tmp_path):
    message = refused(saved(tmp_path, OrderedDict(small())))
    assert "it refers to 'collections.OrderedDict', which is code" in message
    assert "Do not load this file with pickle" in message


@pytest.mark.parametrize(("data", "kind"), [([], "list"), (3, "int"), ("text", "str"), (None, "NoneType")])
def test_plain_data_other_than_a_dict_is_refused(tmp_path, data, kind):
    assert f"it holds a {kind}, but a memory snapshot is a dict" in refused(saved(tmp_path, data))


def test_a_snapshot_without_a_history_is_refused(tmp_path):
    assert "devices with a history: none). Call torch.cuda.memory._record" in refused(
        saved(tmp_path, small(device_traces=[[]]))
    )


SEGMENT = small()["segments"][0]
EVENT = small()["device_traces"][0][0]


@pytest.mark.parametrize(
    "changes",
    [
        {"device_traces": None},
        {"device_traces": {}},
        {"device_traces": [3]},
        {"device_traces": [[3]]},
        {"device_traces": [["alloc"]]},
        {"device_traces": [{"alloc": 1}]},
        {"segments": None},
        {"segments": [3]},
        {"segments": [{}]},
        {"segments": [{**SEGMENT, "address": "here"}]},
        {"segments": [{**SEGMENT, "address": -1}]},
        {"segments": [{**SEGMENT, "total_size": 1 << 64}]},
        {"segments": [{**SEGMENT, "stream": []}]},
        {"segments": [{**SEGMENT, "segment_pool_id": (1,)}]},
        {"segments": [{**SEGMENT, "segment_pool_id": (1, -1)}]},
        {"device_traces": [[{**EVENT, "pool_id": (1,)}]]},
        {"device_traces": [[{**EVENT, "pool_id": (1, 0.5)}]]},
        {"device_traces": [[{**EVENT, "pool_id": [1, 0]}]]},
        {"device_traces": [[{**EVENT, "pool_id": 3}]]},
        {"segments": [{**SEGMENT, "blocks": [{}]}]},
        {"segments": [{**SEGMENT, "blocks": [{"size": 0.5, "state": "inactive"}]}]},
        {"segments": [{**SEGMENT, "blocks": [{"size": 1, "state": []}]}]},
        {"allocator_settings": 3},
        {"allocator_settings": {"max_split_size": "large"}},
        {"allocator_settings": {"roundup_power2_divisions": [1]}},
    ],
)
def test_snapshots_that_pytorch_never_writes_are_refused(tmp_path, changes):
    message = refused(saved(tmp_path, small(**changes)))
    assert "not a memory snapshot written by PyTorch" in message or "no allocator history" in message


def test_a_missing_key_is_named(tmp_path):
    snapshot = small()
    del snapshot["segments"]
    assert "it has no key 'segments'" in refused(saved(tmp_path, snapshot))


def test_a_snapshot_cannot_be_written_to_a_missing_folder(tmp_path):
    trace = read_snapshot(saved(tmp_path, small()))
    with pytest.raises(OutputError, match="No such file or directory"):
        write_snapshot(trace, tmp_path / "none" / "x.pickle")
