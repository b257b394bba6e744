"""Several trainings in one process: the watch counts every step of each."""

import re

import pytest

from support.scripts import WATCHED

IN_TURN = """
    seen = []

    class Writer:
        def add_scalar(self, tag, value, step):
            seen.append(step)

    def fold():
        model = Net().cuda()
        steps(model, torch.optim.Adam(model.parameters()), 12)

    with memfit.watch(writer=Writer()):
        for _ in range(3):
            fold()
        assert seen[::2] == list(range(1, 37)), seen
        model = Net().cuda()
        head = torch.optim.SGD(model.blocks.parameters())
        steps(model, head, 12)
        steps(model, torch.optim.SGD(model.parameters()), 12)  # while the other optimizer still exists
        assert seen[-1] == 60, seen
        steps(model, head, 12)
        assert seen[-1] == 72, seen
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")  # after the last step
"""


@pytest.mark.slow
def test_trainings_in_sequence_are_all_watched(rehearse):
    done = rehearse(WATCHED + IN_TURN)
    assert done.returncode == 0, done.stderr
    assert "memfit: step 72 · peak 1.0 GiB measured" in done.stderr


AGAIN = """
    import os, signal, sys
    import memfit.watching.postmortem

    def fail():
        try:
            torch.empty(1 << 40, device="cuda")
        except torch.OutOfMemoryError:
            return
        raise AssertionError

    seen = []

    class Writer:
        def add_scalar(self, tag, value, step):
            seen.append(step)
            if len(seen) == 3:
                raise OSError("disk full")

    with memfit.watch():
        pass  # over before CUDA is initialised
    torch.empty(1, device="cuda")
    assert memfit.watching.postmortem._observers == []
    with memfit.watch(files=1):
        fail()  # before any step
    run = memfit.watch(writer=Writer(), files=1)
    with run:
        if os.fork() == 0:
            sys.exit(0)  # like any Python exit, with atexit handlers
        os.wait()
        model = Net().cuda()
        optimizer = torch.optim.SGD(model.parameters())
        steps(model, optimizer, 4)
        fail()
    with run:
        steps(model, optimizer, 2)
        fail()
        assert seen == [1, 1, 2, 1, 1, 2, 2], seen

    def interrupted(*_):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
        signal.raise_signal(signal.SIGINT)

    torch.cuda.set_per_process_memory_fraction(0.25)
    with memfit.watch(files=0):
        fail()
        fail()
    with memfit.watch():
        fail()
    memfit.watching.postmortem.run_report_html = interrupted
    with memfit.watch():
        try:
            fail()
        except KeyboardInterrupt:
            print("interrupted")
    memfit.watch().start()  # never stopped
"""


@pytest.mark.slow
def test_watches_survive_restarts_forks_and_interrupts(rehearse):
    done = rehearse(WATCHED + AGAIN)
    assert done.returncode == 0, done.stderr
    # By watches without a step, and not by the child.
    assert done.stderr.count("memfit: no training step") == 6
    assert "memfit: step 2 · peak" in done.stderr
    assert done.stderr.count("memfit: written: memfit-oom-") == 9
    assert "memfit: 0 B allocated\n" in done.stderr
    assert done.stderr.count("memfit: out of memory; memfit writes no further post-mortem") == 1
    allowed = re.findall(r"TiB requested, .* free, (.*) in ", done.stderr)
    assert allowed == ["19.8 GiB allowed (per_process_memory_fraction),"] * 2
    assert done.stdout == "interrupted\n"
