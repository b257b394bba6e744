"""A watched run: measured memory beside the prediction, and nothing left behind."""

import pytest

from memfit import watch
from memfit.errors import UsageError
from memfit.records import Action, Mark, MarkKind
from support.scripts import WATCHED
from support.traces import trace_of

COMPARED = """
    import os
    scalars, own = [], {}

    class Writer:
        def add_scalar(self, tag, value, step):
            scalars.append(((tag, step), value))

    model = Net().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    prediction = "run.memfit" if os.path.exists("run.memfit") else None
    torch.empty(1 << 27, dtype=torch.uint8, device="cuda")  # the peak, until the script resets it
    with memfit.watch(prediction, writer=Writer()):
        steps(model, optimizer, 1)
        own[1] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        steps(model, optimizer, 4)
        own[5] = torch.cuda.max_memory_allocated()
        steps(model, optimizer, 3, batch=8192)
        own[8] = torch.cuda.max_memory_allocated()
    found = dict(scalars)
    assert len(found) == len(scalars) == 8 * 4
    assert own[5] < own[1] < own[8]
    for step, peak in own.items():
        expected = {"measured": peak, "predicted": min(peak, own[5]) if step > 1 else own[1]}
        for whose, bytes in expected.items():
            assert found[f"memfit/peak_allocated_GiB/{whose}", step] == bytes / (1 << 30)
"""


@pytest.mark.slow
def test_steps_are_compared_with_their_prediction(dry_run, rehearse):
    predicted = dry_run(WATCHED + COMPARED, options=("-o", "run.memfit"))
    assert predicted.code == 0
    aside = "memfit: watch() does nothing in this run, because memfit is already recording the script."
    assert predicted.err.splitlines().count(aside) == 1

    done = rehearse(WATCHED + COMPARED)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("memfit:")]
    source = "(predicted: exact on the ghost)"
    assert lines == [
        f"memfit: step 6: peak 203.6 MiB measured, 31.9 MiB predicted, +538.11 % {source}",
        f"memfit: step 8 · peak 203.6 MiB measured · 31.9 MiB predicted · +538.11 % {source}",
    ]


QUIET = """
    import os, pty, sys
    from memfit.recording.recorder import installed_recorder

    def hook_state():
        hooks, optimizers = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
        watched = (
            *((torch._C, name) for name in ("_cuda_emptyCache", "_cuda_resetPeakMemoryStats")),
            *((torch.autograd, name) for name in ("backward", "grad", "_engine_run_backward")),
            *((torch.cuda.CUDAGraph, name) for name in ("capture_begin", "capture_end", "replay")),
            *((hooks, name) for name in vars(hooks) if "hook" in name),
            *((optimizers, name) for name in vars(optimizers) if "hooks" in name),
            (torch.optim.Optimizer, "__init__"),
            (torch.amp.GradScaler, "_maybe_opt_step"),
            (torch.cuda.memory, "_record_memory_history"),
            (torch.cuda.MemPool, "__del__"),
            (torch.autograd.graph, "_engine_run_backward"),
            (sys, "meta_path"),
        )
        found = {(owner.__name__, name): getattr(owner, name, None) for owner, name in watched}
        kept = {key: list(hook) if isinstance(hook, (dict, list)) else hook for key, hook in found.items()}
        return kept, torch._C._cuda_isHistoryEnabled()

    def history():
        return torch.cuda.memory._snapshot()["device_traces"][0]

    def allocations():
        return sum(event["action"] == "alloc" for event in history())

    model = Net().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    steps(model, optimizer, 1)

    before = hook_state()
    with memfit.watch(labels=True):
        assert hook_state() != before
        steps(model, optimizer, 4)
        book = installed_recorder().book
        few = len(history()), len(book.serials), len(book.marks)
        assert few[0] > 4
        steps(model, optimizer, 40)
        assert (len(history()), len(book.serials), len(book.marks)) <= few
    assert installed_recorder() is None
    assert hook_state() == before

    torch.cuda.memory._record_memory_history(max_entries=100_000)
    steps(model, optimizer, 2)
    older = allocations()
    with memfit.watch(labels=True):
        steps(model, optimizer, 4)
        assert allocations() == 3 * older
    assert torch._C._cuda_isHistoryEnabled()
    torch.cuda.memory._record_memory_history(None)
    assert hook_state() == before

    class Full:
        def add_scalar(self, *_):
            raise OSError("disk full")

    with memfit.watch(writer=Full()):
        steps(model, optimizer, 3)

    terminal, end = pty.openpty()
    shell = sys.stderr
    with os.fdopen(end, "w") as sys.stderr, memfit.watch():
        steps(model, optimizer, 1)
    sys.stderr = shell
    try:
        while shown := os.read(terminal, 1 << 16):
            print(shown.decode())
    except OSError:
        pass  # the terminal has no more output
"""


@pytest.mark.slow
def test_a_watch_restores_hooks_and_keeps_no_memory(rehearse):
    done = rehearse(WATCHED + QUIET, TERM="xterm", COLUMNS="100", LINES="30")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("memfit: stopped comparing steps: OSError: disk full") == 1
    assert "\x1b[30;1H\x1b[2Kmemfit: step 1 · peak " in done.stdout
    assert done.stdout.rstrip().endswith("MiB at the end of the step")


def test_invalid_arguments_are_refused(tmp_path):
    with pytest.raises(UsageError, match="folder for post-mortems does not exist"):
        watch(folder=tmp_path / "gone")
    with pytest.raises(UsageError, match="contains no complete training step"):
        watch(trace_of([]))
    with pytest.raises(UsageError, match="like the trace of a post-mortem"):
        watch(trace_of([(Action.EARLIER, 0, 512)], marks=(Mark(1, MarkKind.TRAINING_STEP, 0),)))
    for invalid in ({"prediction": 3}, {"writer": 3}, {"files": "a"}, {"files": -1}, {"folder": None}):
        with pytest.raises(UsageError, match=f"^'?{next(iter(invalid))}(' must be|=)|does not exist: None"):
            watch(**invalid)
