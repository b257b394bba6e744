"""The log of an arena as a trace."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit.arenas import arena_library
from memfit.arenas.arena_library import FREED
from memfit.arenas.arena_trace import trace_of_arena_log
from memfit.errors import UsageError
from memfit.records import Action, DeviceUse, Figure, MachineKind, MarkKind, Provenance

NOTHING = Figure(0, Provenance.EXACT)
CPU = DeviceUse("CPU", NOTHING, NOTHING, 0, MachineKind.CPU)


def test_a_log_becomes_events_in_order():
    rows = np.array(
        [
            (0x9000, FREED, 10, 7),  # older than the log
            (0x1000, 100, 11, 7),
            (0x2000, 50, 12, 3),
            (0x1000, FREED, 13, 7),
            (0x1000, 30, 14, 7),
        ]
    )
    trace = trace_of_arena_log(rows, [1, 4, 5], CPU)
    events = trace.events
    assert [Action(action).name for action in events.action] == [
        "ALLOC",
        "ALLOC",
        "FREE_REQUESTED",
        "FREE_COMPLETED",
        "ALLOC",
    ]
    assert events.size.tolist() == [100, 50, 100, 100, 30]
    assert events.address.tolist() == [0x1000, 0x2000, 0x1000, 0x1000, 0x1000]
    assert events.stream.tolist() == [0, 1, 0, 0, 0]
    assert events.time.tolist() == [11, 12, 13, 13, 14]
    assert [(mark.position, mark.kind) for mark in trace.marks] == [
        (0, MarkKind.TRAINING_STEP),
        (4, MarkKind.TRAINING_STEP),
        (5, MarkKind.TRAINING_STEP),
    ]


def test_packing_a_cpu_trace_equals_the_arenas_plan(tmp_path):
    with contextlib.closing(memfit.arena(device="cpu", history=True)) as arena:
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            with arena.train():
                model(torch.ones(32, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        plan = next(iter(arena._kinds.values())).plan
        arena.write_trace(tmp_path / "run.memfit")
    packed = memfit.pack(tmp_path / "run.memfit")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert packed.step == 5
    assert packed.reserved == ()
    assert 2 * weights + plan.height <= packed.live <= 2 * weights + plan.height + 64 * 8
    assert "reserved" not in str(packed)


def test_a_full_history_adds_a_note(monkeypatch):
    monkeypatch.setattr("memfit.arenas.arena.MOST_LOGGED", 10)
    with contextlib.closing(memfit.arena(device="cpu", history=True)) as arena:
        for _ in range(20):
            torch.ones(3)
        (note,) = arena.trace().notes
        assert "was full" in note.text
        assert len(arena_library.logged_requests(arena._memory.arena)) == 10


def test_a_history_is_kept_only_on_request():
    with contextlib.closing(memfit.arena(device="cpu")) as arena:
        torch.ones(3)
        with pytest.raises(UsageError, match="history=True"):
            arena.trace()


def test_an_arenas_trace_is_replayed_but_gets_no_recommendation(tmp_path):
    rows = np.array([(0x1000, 3 << 20, 11, 7), (0x1000, FREED, 13, 7), (0x2000, 30 << 20, 14, 7)])
    trace = trace_of_arena_log(rows, [], replace(CPU, machine=MachineKind.CARD))
    replayed = memfit.replay(trace, memory=1 << 40)
    assert replayed.current.replay.peak_reserved == 50 << 20  # segments of 20 and of 30 MiB
    assert not memfit.explain(trace).summary.advice


def test_a_cpu_trace_is_explained_but_not_replayed():
    trace = trace_of_arena_log(np.array([(0x1000, 3 << 20, 11, 7)]), [], CPU)
    text = str(memfit.explain(trace))
    assert "CPU tensors" in text
    assert "CUDA context" not in text
    assert "nvidia-smi" not in text
    with pytest.raises(UsageError, match="trace of CPU tensors"):
        memfit.replay(trace, memory=1 << 40)
