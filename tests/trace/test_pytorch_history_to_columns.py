"""PyTorch's history as columns: the values of each column, which frames are kept, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from memfit.records import Action, Frame
from memfit.trace import stack_table
from memfit.trace.pytorch_history_to_columns import distinct_pools_of_history, history_columns, stream_numbers
from memfit.trace.stack_table import DEPTH, StackTable


def event(action="alloc", **changes):
    return {"action": action, "addr": 1 << 45, "size": 100, "stream": 0, "time_us": 7, "frames": []} | changes


def frame(file, line=1, name="f"):
    return {"filename": file, "line": line, "name": name}


def read(*events, label_of=lambda _metadata: -1, is_user_file=lambda _file: True):
    return history_columns(list(events), label_of=label_of, is_user_file=is_user_file)


def test_every_action_has_its_number():
    actions = [action for action in Action if action is not Action.OOM]
    found, _, _ = read(*(event(action.name.lower()) for action in actions))
    assert found.action.tolist() == actions
    assert found.address.tolist() == [1 << 45] * len(actions)
    assert found.size.tolist() == [100] * len(actions)
    assert found.time.tolist() == [7] * len(actions)
    assert found.category.tolist() == [0] * len(actions)


def test_an_oom_has_the_free_bytes_as_its_address():
    failed = event("oom", device_free=12345)
    del failed["addr"]
    found, _, _ = read(failed)
    assert found.address.tolist() == [12345]


def test_columns_have_the_types_of_the_record():
    found, _, _ = read(event(pool_id=(0, 0)))
    assert found.tensor is None  # the history does not know tensors
    assert {name: getattr(found, name).dtype for name in found.__dataclass_fields__ if name != "tensor"} == {
        "action": np.uint8,
        "address": np.uint64,
        "size": np.int64,
        "stream": np.int32,
        "time": np.int64,
        "label": np.int32,
        "stack": np.int32,
        "category": np.uint8,
        "pool": np.int32,
    }


def test_the_history_of_an_early_pytorch_is_read():
    found, stacks, frames = read({"action": "alloc", "addr": 1, "size": 2, "stream": 0})
    assert (found.time[0], found.label[0], found.stack[0]) == (0, -1, -1)
    assert stacks == frames == ()
    assert found.pool is None


def test_pools_are_numbered_by_appearance_after_the_default_pool():
    history = [event(pool_id=pool) for pool in ((0, 3), (0, 0), (1, 0), (0, 3))]
    assert read(*history)[0].pool.tolist() == [1, 0, 2, 1]
    assert distinct_pools_of_history(history, [{"segment_pool_id": (2, 0)}]) == (
        (0, 0),
        (0, 3),
        (1, 0),
        (2, 0),
    )


def test_each_label_is_looked_up_once():
    looked_up = []

    def label_of(metadata):
        looked_up.append(metadata)
        return int(metadata or -1)

    found, _, _ = read(*(event(user_metadata=text) for text in ("4", "", "4")), label_of=label_of)
    assert found.label.tolist() == [4, -1, 4]
    assert looked_up == ["4", ""]


def test_the_default_stream_is_0_wherever_it_appears():
    found, _, _ = read(event(stream=900), event(stream=0), event(stream=800), event(stream=900))
    assert found.stream.tolist() == [1, 0, 2, 1]
    assert stream_numbers([]) == {0: 0}


def test_equal_stacks_are_stored_once_innermost_frame_first():
    inner, outer = frame("model.py", 3, "forward"), frame("train.py", 9, "main")
    shared = [inner, outer]
    found, stacks, frames = read(
        event(frames=shared),
        event(frames=shared),
        event(frames=[dict(inner), dict(outer)]),
        event(frames=[outer]),
    )
    assert found.stack.tolist() == [0, 0, 0, 1]
    assert stacks == ((0, 1), (1,))
    assert frames == (Frame("model.py", 3, "forward", user=True), Frame("train.py", 9, "main", user=True))


def test_each_file_is_classified_once():
    looked_up = []

    def is_user_file(file):
        looked_up.append(file)
        return file == "train.py"

    frames_in = [frame("train.py", 1), frame("train.py", 2), frame("/usr/lib/python3.11/runpy.py", 3)]
    _, _, frames = read(event(frames=frames_in), is_user_file=is_user_file)
    assert [kept.user for kept in frames] == [True, True, False]
    assert looked_up == ["train.py", "/usr/lib/python3.11/runpy.py"]


MEMFIT = Path(stack_table.__file__).parents[1]
LEFT_OUT = [
    "/opt/lib/python3.12/site-packages/torch/nn/modules/module.py",
    "/usr/lib/python3/dist-packages/torch/_tensor.py",
    r"C:\Python\Lib\site-packages\torch\_tensor.py",
    "/home/me/site-packages/memfit/cli.py",
    str(MEMFIT / "run" / "child.py"),
    "<frozen runpy>",
    "??",
    "",
    "/pytorch/c10/cuda/CUDACachingAllocator.cpp",
    "../csu/libc-start.c",
]


@pytest.mark.parametrize("file", LEFT_OUT)
def test_frames_of_libraries_and_native_code_are_left_out(file):
    found, stacks, frames = read(event(frames=[frame(file)]))
    assert (found.stack[0], stacks, frames) == (-1, (), ())


@pytest.mark.parametrize(
    "file", ["/home/me/torch/train.py", "<stdin>", "/home/me/train", "torch/x.py", "a.cpp.py"]
)
def test_frames_of_user_files_are_kept(file):
    _, _, frames = read(event(frames=[frame(file)]))
    assert [kept.file for kept in frames] == [file]


def test_the_imported_torch_is_left_out_wherever_it_is_installed(monkeypatch):
    torch = type("Module", (), {"__file__": "/src/pytorch/torch/__init__.py"})
    monkeypatch.setitem(stack_table.sys.modules, "torch", torch)
    _, _, frames = read(event(frames=[frame("/src/pytorch/torch/nn/x.py"), frame("/src/pytorch/train.py")]))
    assert [kept.file for kept in frames] == ["/src/pytorch/train.py"]


def test_the_innermost_frames_are_kept():
    _, stacks, frames = read(event(frames=[frame("f.py", line) for line in range(100)]))
    assert [frames[index].line for index in stacks[0]] == list(range(DEPTH))


def test_columns_extend_a_given_table_of_stacks():
    table = StackTable(lambda _file: True)
    assert table.intern([("train.py", 1, "main"), ("/x/site-packages/torch/a.py", 2, "g")]) == 0
    assert table.intern([("/x/site-packages/torch/a.py", 2, "g")]) == -1
    found, stacks, frames = history_columns(
        [event(frames=[frame("train.py", 1, "main")]), event(frames=[frame("b.py")])],
        label_of=lambda _metadata: -1,
        is_user_file=lambda _file: True,
        table=table,
    )
    assert found.stack.tolist() == [0, 1]
    assert (stacks, frames) == (table.stacks, table.frames)


@pytest.mark.parametrize(
    "invalid",
    [
        {"action": "dance"},
        {"size": "100"},
        {"size": 1.5},
        {"size": 1 << 63},
        {"addr": -1},
        {"addr": None},
        {"stream": []},
        {"time_us": "now"},
        {"user_metadata": []},
        {"frames": 3},
        {"frames": [3]},
        {"frames": [{}]},
        {"frames": [{"filename": "f", "line": "1", "name": "f"}]},
        {"frames": [{"filename": "f", "line": 1 << 40, "name": "f"}]},
        {"frames": [{"filename": 1, "line": 1, "name": "f"}]},
        {"frames": [{"filename": "f", "line": 1, "name": []}]},
    ],
)
def test_events_that_pytorch_never_writes_are_refused(invalid):
    with pytest.raises((KeyError, TypeError, ValueError, OverflowError)):
        read(event(**invalid))
