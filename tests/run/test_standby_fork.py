"""Runs that go on from a fork of the script's process: as whole runs would have, or not at all."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from forked_runs import difference

from memfit.records import Change
from memfit.trials.runs_side_by_side import run_scripts_side_by_side
from memfit.trials.script_standbys import ForkedScript, ScriptStandbys
from support.new_processes import start_memfit
from support.scripts import LATE_FREES
from support.standby_runs import LATE, OPTIONS, TRAIN, Runs, script_of

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm_scripts")]

DRAWN = "1 + random.randrange(1 << 20)"
READ = "int(numbers.readline())"


RACES_IN_EACH_STEP = """
    block = torch.empty(20 << 20, dtype=torch.uint8, device="cuda")
    block.record_stream(torch.cuda.Stream())
    del block
    again = torch.empty(20 << 20, dtype=torch.uint8, device="cuda")
"""


@pytest.mark.parametrize(
    ("before", "size"),
    [
        pytest.param("random.seed(7); random.random()", DRAWN, marks=pytest.mark.slow),
        ("numbers = open(__file__ + '.txt'); numbers.readline()", READ),
        pytest.param(
            "torch.set_num_threads(4); torch.randn(1 << 22).sum()",
            "int(torch.ones(1 << 22).sum())",
            marks=pytest.mark.slow,
        ),
        pytest.param("side = torch.cuda.Stream()", "1 << 20", marks=pytest.mark.slow),
        pytest.param("torch.manual_seed(3)", "int(torch.randint(1 << 20, (1,)))", marks=pytest.mark.slow),
    ],
)
def test_a_forked_run_has_the_trace_of_a_whole_run(tmp_path, before, size):
    script = script_of(tmp_path, before, size, RACES_IN_EACH_STEP)
    Path(f"{script}.txt").write_text("".join(f"{1000 * line}\n" for line in range(1, 10)))
    with ScriptStandbys() as standbys:
        runs = Runs(script, standbys)
        early = runs.run().trace
        assert not runs.forked
        for options, whole in ((OPTIONS, early), (LATE, runs.whole(LATE).trace), (OPTIONS, early)):
            assert difference(runs.run(options).trace, whole) == ""
            assert runs.forked
    assert difference(early, runs.whole(LATE).trace), "the script does not race"


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("child = os.posix_spawnp('sleep', ['sleep', '30'], os.environ)", "started a process"),
        ("file = open(__file__ + '.log', 'w+')", "script.py.log open"),
        ("import socket; pair = socket.socketpair()", "open"),
        ("torch.ones(1, requires_grad=True, device='cuda').sum().backward()", "PyTorch has started a thread"),
    ],
)
def test_a_script_with_what_a_fork_lacks_is_run_as_a_whole(tmp_path, before, why):
    end = "\nif 'child' in globals(): os.kill(child, 9)"
    with ScriptStandbys() as standbys:
        runs = Runs(script_of(tmp_path, before, after=end), standbys)
        runs.run()
        runs.run(LATE)
        assert not runs.forked
        assert why in runs.why_whole


@pytest.mark.parametrize(
    "start",
    [
        "threading.Thread(target=threading.Event().wait, daemon=True).start()",
        pytest.param(
            "from concurrent.futures import ThreadPoolExecutor as Pool; pool = Pool(); "
            "pool.submit(int).result()",
            marks=pytest.mark.slow,
        ),
        "import subprocess; child = subprocess.Popen(['sleep', '30']).pid",
        "import multiprocessing; multiprocessing.Process(target=threading.Event().wait, daemon=True).start()",
    ],
)
def test_what_a_script_does_before_its_threads_and_processes_is_done_once(tmp_path, start):
    text = f"""
def note(text):
    with open(__file__ + '.log', 'a') as file:
        file.write(text)
drawn = random.random()
note('before ')
{start}
note('after ')
"""
    end = "\nif 'child' in globals(): os.kill(child, 9)"
    script = script_of(tmp_path, text, "int(drawn * 2**20)", after=end)
    with ScriptStandbys() as standbys:
        runs = Runs(script, standbys)
        runs.run()
        found = runs.run(LATE).trace
        assert runs.forked
    assert Path(f"{script}.log").read_text() == "before after after "
    assert len(found.events.action)


def test_what_has_ended_when_a_script_trains_keeps_nothing_from_being_shared(tmp_path):
    text = """
import subprocess
def note(text):
    with open(__file__ + '.log', 'a') as file:
        file.write(text)
for each in range(200):
    thread = threading.Thread(target=note, args=('thread ',))
    thread.start()
    thread.join()
subprocess.run(['true'])
note('after ')
"""
    script = script_of(tmp_path, text)
    with ScriptStandbys() as standbys:
        runs = Runs(script, standbys)
        whole = runs.run().trace
        assert difference(runs.run().trace, whole) == ""
        assert runs.forked
    assert Path(f"{script}.log").read_text() == 200 * "thread " + "after "


@pytest.mark.slow
def test_a_run_that_begins_otherwise_is_a_whole_run_and_leaves_a_standby_of_its_own(tmp_path):
    begin_otherwise = (
        (replace(LATE, values="float=2"), Change()),
        (LATE, Change()),
        (OPTIONS, Change()),  # work before the fork is not late
        (LATE, Change(fused=True)),
    )
    with ScriptStandbys() as standbys:
        runs = Runs(script_of(tmp_path), standbys)
        for options, change in begin_otherwise:
            runs.run(options, change)
            assert not runs.forked
        for options, change in begin_otherwise:
            runs.run(options, change)
            assert runs.forked
        runs.run(replace(LATE, steps=2))  # a fifth: the standby that was used first makes room
        assert not runs.forked
        for (options, change), forked in ((begin_otherwise[-1], True), (begin_otherwise[0], False)):
            runs.run(options, change)
            assert runs.forked == forked


def test_a_run_goes_on_from_the_standby_that_is_ready(tmp_path):
    before = """
if not os.path.exists(__file__ + '.ran'):
    open(__file__ + '.ran', 'w').close()
    import socket
    pair = socket.socketpair()
"""
    with ScriptStandbys() as standbys:
        runs = Runs(script_of(tmp_path, before), standbys)
        for options, forked in ((LATE, False), (OPTIONS, False), (LATE, True)):  # the first has a socket
            runs.run(options)
            assert runs.forked == forked


def test_no_further_standby_is_left_where_memory_is_short(tmp_path, monkeypatch):
    monkeypatch.setattr("memfit.trials.script_standbys.count_scripts_that_fit_in_memory", lambda: 2)
    with ScriptStandbys() as standbys:
        runs = Runs(script_of(tmp_path), standbys)
        for options, forked in ((LATE, False), (OPTIONS, False), (OPTIONS, False), (LATE, True)):
            runs.run(options)
            assert runs.forked == forked


def test_runs_are_forked_side_by_side(tmp_path):
    """Each waits for the other: in turn, neither would end."""
    meet = """
def meet(step):
    if step == 1:
        open(f"{__file__}.{os.getpid()}", "w")
        while os.getpid() != SCRIPT and len(list(Path(__file__).parent.glob("*.py.*"))) < 3:
            time.sleep(0.02)
    return 1
SCRIPT = os.getpid()
"""
    script = script_of(tmp_path, f"import time\nfrom pathlib import Path\n{meet}", "meet(step)")
    with ScriptStandbys() as standbys:
        runs = Runs(script, standbys)
        first = runs.run().trace
        both = run_scripts_side_by_side([Runs(script, standbys).run, Runs(script, standbys).run], 2)
        assert len(list(tmp_path.glob("*.py.*"))) == 3
        assert [difference(run.trace, first) for run in both] == ["", ""]


BLOCKS = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU())
        self.outer = torch.nn.Linear(1024, 256)
    def forward(self, x):
        return x + self.outer(self.inner(x))
model = torch.nn.Sequential(*(Block() for _ in range(4))).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
"""
CHECKPOINTED = {"checkpointing": {}}
OFFLOADED = {"offload": {"what": "inputs", "min_bytes": 0}}


def untimed(step):
    """Return a step's operations without the seconds that they took here."""
    alike = [tuple(replace(one, seconds=0.0) for one in each) for each in (step.forward, step.backward)]
    return replace(step, forward=alike[0], backward=alike[1])


@pytest.mark.parametrize(
    "strategies", [CHECKPOINTED, pytest.param(CHECKPOINTED | OFFLOADED, marks=pytest.mark.slow)]
)
def test_strategies_are_applied_in_a_fork_as_when_the_optimizer_was_created(tmp_path, strategies):
    with ScriptStandbys() as standbys:
        runs = Runs(script_of(tmp_path, BLOCKS), standbys)
        first = runs.run(change=Change(operations=True))
        assert first.operations is not None
        for optimizer in (None, 1):  # the first one's model is a single layer, which is left alone
            change = Change(strategies, optimizer=optimizer)
            found, whole = runs.run(LATE, change), runs.whole(LATE, change)
            assert runs.forked
            assert (difference(found.trace, whole.trace), found.models) == ("", whole.models)
            assert found.operations is None
            assert difference(found.trace, first.trace)
        assert len(found.models) == 1
        recorded = replace(change, operations=True)
        found, whole = runs.run(OPTIONS, recorded), runs.whole(OPTIONS, recorded)
        assert runs.forked
        assert untimed(found.operations) == untimed(whole.operations)


@pytest.mark.parametrize(
    ("before", "call"),
    [
        (f"{BLOCKS}\nmodel = torch.nn.Sequential(model)", "model("),  # the plan was not for this one
        pytest.param(BLOCKS, "model.forward(", marks=pytest.mark.slow),
    ],
)
def test_a_plan_that_would_have_come_too_late_runs_the_whole_script(tmp_path, before, call):
    change = Change(CHECKPOINTED, optimizer=1)
    script = script_of(tmp_path, before)
    Path(script).write_text(Path(script).read_text().replace("    model(", f"    {call}"))
    with ScriptStandbys() as standbys:
        runs = Runs(script, standbys)
        runs.run()
        runs.run(change=change)
        assert not runs.forked
        runs.run(LATE)
        assert runs.forked


def test_what_a_script_leaves_for_its_end_happens_once_where_it_was_left(tmp_path):
    before = """
def note(text):
    with open(__file__ + '.log', 'a') as file:
        file.write(text + '\\n')
atexit.register(note, 'begun before')
log = open(__file__ + '.steps', 'w', buffering=1)
log.write('begun\\n')"""
    after = "    log.write(f'{step}\\n')\natexit.register(note, 'begun after')"
    script = script_of(tmp_path, before, after=after)
    with ScriptStandbys() as standbys:
        runs = Runs(script, standbys)
        runs.run()
        log = Path(f"{script}.log")
        assert log.read_text() == "begun before\n"  # memfit ends a script within its third step
        assert Path(f"{script}.steps").read_text() == "begun\n0\n1\n"
        runs.run(replace(OPTIONS, finish_late=True))
        assert runs.forked
    assert log.read_text() == "begun before\n"
    assert Path(f"{script}.steps").read_text() == "begun\n0\n1\n"


def test_a_fork_that_fails_is_followed_by_a_whole_run(tmp_path):
    """The script removes at its end what a fork of it needs."""
    before = (
        "import tempfile; folder = tempfile.TemporaryDirectory(); open(folder.name + '/a', 'w').write('8')"
    )
    with ScriptStandbys() as standbys:
        runs = Runs(script_of(tmp_path, before, "int(open(folder.name + '/a').read())"), standbys)
        early = runs.run().trace
        assert difference(runs.run().trace, early) == ""
        assert not runs.forked


def processes(text):
    """Return the processes, zombies apart, whose environment has a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and text.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def wait_until(condition):
    for _ in range(1000):
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def marked(tmp_path):
    """Start a dry run whose script tells, in a file, which process it is in; all it starts bear a mark."""
    started = []

    def start(after):
        before = "import time; SCRIPT = os.getpid()"
        script = script_of(tmp_path, before, after=after)
        mark = f"MEMFIT_TEST_MARK={tmp_path}"
        process = start_memfit("dry-run", "--to-end", script, cwd=tmp_path, MEMFIT_TEST_MARK=str(tmp_path))
        started.append(process)
        return process, mark

    yield start
    for process in started:
        process.kill()
        process.communicate()


HANGS_IN_THE_FORK = f"""{LATE_FREES}
if os.getpid() != SCRIPT:
    open(__file__ + '.fork', 'w').write(str(os.getpid()))
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGINT, True), (signal.SIGKILL, False)])
def test_the_end_of_memfit_ends_the_standby_and_its_forks(tmp_path, marked, number, to_group):
    process, mark = marked(HANGS_IN_THE_FORK)
    assert wait_until(Path(f"{tmp_path}/script.py.fork").exists)
    assert len(processes(mark)) >= 3  # memfit, the standby, and its fork
    (os.killpg if to_group else os.kill)(process.pid, number)
    process.communicate(timeout=30)
    assert process.returncode == (130 if to_group else -number)
    assert wait_until(lambda: not processes(mark))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["raise ValueError('ends here')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_script_that_dies_takes_its_standby_along(marked, end):
    process, mark = marked(f"import signal\n{end}")
    process.communicate(timeout=60)
    assert process.returncode == 3
    assert wait_until(lambda: not processes(mark))


@pytest.mark.slow
def test_the_output_says_how_the_script_ran_again(dry_run):
    script = textwrap.dedent(TRAIN).replace("BEFORE", "pass").replace("SIZE", "1")
    run = dry_run(script + LATE_FREES, options=("--to-end",))
    assert run.answer["range"] is not None
    assert "going on from a copy of the script's process" in run.err
    assert "running the script again" not in run.err
    run = dry_run(script.replace("pass", "pipe = os.pipe()") + LATE_FREES, options=("--to-end",))
    assert run.answer["range"] is not None
    assert "It starts the script anew each time, because the script has pipe:" in run.err


def test_a_fork_that_takes_too_long_is_killed():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ended = []

    def exit_code(_process, _seconds):
        return process.wait() if ended else None

    fork = ForkedScript(process.pid, exit_code, time.monotonic())
    assert fork.poll() is None
    ended.append(True)
    assert fork.wait() == -signal.SIGKILL
