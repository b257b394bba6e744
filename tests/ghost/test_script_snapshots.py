"""A script's own memory snapshots under memfit are those that PyTorch makes without memfit."""

import json

import pytest

SCRIPT = '''
import json, pickle
import torch
from torch.cuda.memory import _dump_snapshot, _record_memory_history, _snapshot

MIB = 1 << 20
told = []

def tell(snapshot):
    told.append([
        [
            (event["action"], event["size"], event.get("user_metadata"), stack(event))
            for event in snapshot["device_traces"][0]
        ],
        [
            (block["state"], block["size"], stack(block))
            for segment in snapshot["segments"] for block in segment["blocks"]
        ],
    ])

def stack(entry):
    """Return the frames, except the one by which PyTorch calls modules with hooks, such as memfit's."""
    frames = [(frame["filename"].rpartition("/")[2], frame["name"]) for frame in entry.get("frames", ())]
    return [frame for frame in frames if frame != ("module.py", "inner")]

def hold(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

def release(blocks):
    del blocks[:]

def step(model=torch.nn.Linear(64, 64)):
    model.cuda()
    model(torch.ones(8, 64, device="cuda")).sum().backward()

def window(**settings):
    """Allocate before, in and after a window of its own."""
    before = [hold(3)]
    _record_memory_history(**settings)
    step()
    inside = [hold(30), hold(5)]
    release(before)
    release(inside)
    kept = hold(7)
    tell(_snapshot())
    _record_memory_history(enabled=None)
    tell(_snapshot())
    return kept

kept = [
    window(stacks="python"),
    window(stacks="python", context="alloc", max_entries=4),
    window(stacks="python", context="state"),
    window(context=None, skip_actions=["free_requested"]),
    window(enabled=True, trace_alloc_max_entries=3, trace_alloc_record_context=True),
]
_record_memory_history(stacks="python")
one = hold(2)
_record_memory_history(stacks="python", context="alloc")
two = hold(4)
torch.cuda.memory._dump_snapshot("mine.pickle")
with open("mine.pickle", "rb") as file:
    tell(pickle.load(file))
_record_memory_history(stacks="python", clear_history=True)
three = hold(6)
tell(torch.cuda.memory._snapshot())
print("TOLD", json.dumps(told))
'''


def told(output):
    return json.loads(next(line for line in output.splitlines() if line.startswith("TOLD"))[4:])


@pytest.mark.slow
def test_a_script_gets_its_own_window_with_its_own_settings(on_ghost, dry_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = told(on_ghost(SCRIPT))
    assert [bool(events) for events, _ in alone] == [True, False] * 5 + [True] * 2
    assert told(dry_run(SCRIPT, options=("--to-end",)).out) == alone
