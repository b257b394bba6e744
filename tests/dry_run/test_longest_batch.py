"""memfit dry-run --longest: the batch that needs most is found, run first, and compared with smaller ones.

The referee is the same script with nothing but that batch.
"""

import inspect
import os
import signal
from pathlib import Path

import pytest

from support.endless_loader import Endless, KeepsWorkers
from support.new_processes import start_memfit

EXAMPLE = Path(__file__).parents[2] / "examples/longest_batch.py"
SCRIPT = """
import random, sys
import numpy, torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, RandomSampler

lengths = [40 + 10 * (n % 2) for n in range(40)]
lengths[33], lengths[21] = 200, 120
if len(sys.argv) > 1 and sys.argv[1].isdigit():
    lengths = [int(sys.argv[1])] * 40
data = [torch.full((length, 64), length, dtype=torch.float32) for length in lengths]

def collate(rows):
    return {"x": pad_sequence(rows, batch_first=True), "of": len(rows)}

torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)).cuda()
optimizer = torch.optim.Adam(model.parameters())
sampler = RandomSampler(data, generator=torch.Generator().manual_seed(5))
loader = DataLoader(data, batch_size=2, sampler=sampler, collate_fn=collate)
for batch in loader:
    x = batch.pop("x")
    print("batch", x.shape[1], torch.rand(1).item(), random.random(), numpy.random.rand())
    optimizer.zero_grad()
    model(x.cuda()).sum().backward()
    optimizer.step()
print("passed", len(loader))
"""
LINE = 1 + SCRIPT.splitlines().index(
    "loader = DataLoader(data, batch_size=2, sampler=sampler, collate_fn=collate)"
)
warm = pytest.mark.warm


def printed(run):
    """Return the words of each line in which the script says what it was given."""
    return [line.split()[1:] for line in run.out.splitlines() if line.startswith("batch")]


def lengths(run):
    return [int(words[0]) for words in printed(run)]


@warm
def test_the_largest_batch_comes_first_and_needs_what_it_needs_alone_and_in_the_whole_run(dry_run):
    run = dry_run(SCRIPT, options=("--longest", "--to-end"))
    (found,) = run.answer["longest"]
    assert found["where"] == f"{run.folder / 'script.py'}:{LINE}"
    assert (found["seen"], found["of"], found["ended"]) == (20, 20, "pass")
    assert found["largest"] == {"bytes": 2 * 200 * 64 * 4, "shape": [2, 200, 64]}
    assert found["median"] == {"bytes": 2 * 50 * 64 * 4, "shape": [2, 50, 64]}
    measured = {each["batch"]["shape"][1]: each["allocated"] for each in found["measured"]}
    assert list(measured) == [200, 120, 50]
    for length in (200, 50):
        assert dry_run(SCRIPT, str(length)).answer["peak"]["allocated"] == measured[length], length
    plain = dry_run(SCRIPT, options=("--to-end",))
    assert plain.answer["longest"] == []
    assert run.answer["peak"]["allocated"] == measured[200] == plain.answer["peak"]["allocated"]
    assert lengths(run)[:4] == [200, 200, 50, 120] != lengths(plain)[:4]
    assert printed(run)[4:] == printed(plain)[4:], "the order of the other batches, or the random numbers"
    assert [words[1:] for words in printed(run)] == [words[1:] for words in printed(plain)]


@warm
def test_the_line_says_up_to_which_length_batches_fit(dry_run):
    wide = SCRIPT.replace("512", "8192")
    fits = dry_run(wide, options=("--longest",))
    assert (fits.answer["end"]["reason"], lengths(fits)) == ("steps", [200, 200, 50, 120])
    assert "even 4 times the largest would fit." in fits.out
    peak, (found,) = fits.answer["peak"], fits.answer["longest"]
    context, least = peak["process"] - peak["reserved"], found["measured"][-1]["allocated"]
    memory = context + (least + peak["reserved"]) // 2
    tight = dry_run(wide, options=("--longest", "--memory", str(memory)))
    assert tight.answer["verdict"] == "out of memory"
    assert set(lengths(tight)) == {200}  # the smaller batches have run where memory has no limit
    (limited,) = tight.answer["longest"]
    assert limited["measured"] == found["measured"]
    assert 50 < limited["fits_length"] < 200
    assert limited["fits_bytes"] // (2 * 64 * 4) == limited["fits_length"]
    assert f"up to about 2 x {limited['fits_length']} x 64 would fit." in tight.out


@pytest.mark.slow
@warm
def test_the_example_fits_for_three_steps_and_runs_out_with_its_longest_batch(dry_run):
    script = EXAMPLE.read_text()
    pages = ("--html", "report.html")
    run = dry_run(script, "--sentences", "160", options=("--longest", "--memory", "1100MiB", *pages))
    assert dry_run(script, "--sentences", "160", options=("--memory", "1100MiB")).answer["verdict"] == "fits"
    assert run.answer["verdict"] == "out of memory"
    failure, (found,) = run.answer["out_of_memory"], run.answer["longest"]
    assert (failure["phase"], failure["module"]) == ("backward", "layers.1.linear1")
    assert f"Ran out in: step {failure['step']} · backward · layers.1.linear1" in run.out
    assert (found["largest"]["shape"], found["median"]["shape"]) == ([16, 513], [16, 129])
    assert "the largest is 16 x 513 (64.1 KiB), 4.0 times the median of 16 x 129 (16.1 KiB)." in run.out
    page = (run.folder / "report.html").read_text()
    assert "the largest is 16 x 513 (64.1 KiB), 4.0 times the median of 16 x 129 (16.1 KiB)." in page
    allocated = found["measured"][0]["allocated"]
    room = (1100 << 20) - (run.answer["peak"]["process"] - run.answer["peak"]["reserved"])
    assert allocated < room, "what the allocator caches makes the run fail, and counts in what would fit"
    assert 129 < found["fits_length"] < 513
    whole = dry_run(script, "--sentences", "160", options=("--to-end",)).answer
    assert allocated == whole["peak"]["allocated"]
    assert whole["peak"]["step"] == 9


@pytest.mark.slow
@warm
def test_equal_batches_are_said_in_one_line_and_change_nothing(dry_run):
    run = dry_run(SCRIPT, "40", options=("--longest", "--steps", "3"))
    lines = [line for line in run.out.splitlines() if "Batches of" in line or "Most allocated" in line]
    of = "none is larger than the median, 2 x 40 x 64 (20.0 KiB). All 20 of the pass were seen."
    assert lines == [f"Batches of script.py:{LINE}: {of}"]
    assert run.answer["peak"] == dry_run(SCRIPT, "40").answer["peak"]


@warm
def test_with_accumulated_gradients_a_size_lasts_for_a_whole_step(dry_run):
    script = SCRIPT.replace("for batch in loader", "for number, batch in enumerate(loader, 1)").replace(
        "    optimizer.step()", "    if number % 3 == 0: optimizer.step()"
    )
    run = dry_run(script, options=("--longest",))
    assert lengths(run) == [200] * 6 + [50] * 3 + [120] * 3
    assert [each["batch"]["shape"][1] for each in run.answer["longest"][0]["measured"]] == [200, 120, 50]


EVALUATION = """
model.eval()
with torch.no_grad():
    for batch in DataLoader(data, batch_size=3, collate_fn=collate, num_workers=1):
        model(batch["x"].cuda())
        print("batch", batch["x"].shape[1])
"""


@warm
def test_a_whole_run_looks_through_every_loader_and_keeps_its_passes_short(dry_run):
    run = dry_run(SCRIPT + EVALUATION, options=("--longest", "--whole"))
    training, evaluation = run.answer["longest"]
    assert (training["seen"], evaluation["seen"]) == (20, 14)
    assert lengths(run) == [200, 200, 50, 200, 50, 120]
    assert "passed 3\n" in run.out
    measured = {each["batch"]["shape"][1]: each["allocated"] for each in evaluation["measured"]}
    assert list(measured) == [200, 120, 50]
    stage = next(stage for stage in run.answer["stages"] if stage["name"] == "evaluation")
    assert stage["allocated"] == measured[200] > measured[120] > measured[50]


@warm
def test_of_a_loader_whose_sampler_never_ends_one_pass_is_looked_through(dry_run):
    classes = "".join(map(inspect.getsource, (KeepsWorkers, Endless)))
    script = SCRIPT.replace("loader = DataLoader", f"{classes}\nloader = KeepsWorkers")
    run = dry_run(script, options=("--longest", "--whole"))
    (found,) = run.answer["longest"]
    assert (found["seen"], found["of"], found["ended"]) == (20, 20, "pass")
    assert lengths(run) == [200, 200, 50]


ENDLESS = """
import torch
from torch.utils.data import DataLoader, IterableDataset

class Endless(IterableDataset):
    def __iter__(self):
        number = 0
        print("reading", flush=True)
        while True:
            number += 1
            yield torch.ones(100 + 50 * (number == 7), 64)

model = torch.nn.Linear(64, 512).cuda()
optimizer = torch.optim.Adam(model.parameters())
for x in DataLoader(Endless(), batch_size=None):
    model(x.cuda()).sum().backward()
    optimizer.step()
"""


@warm
def test_a_loader_without_an_end_is_read_until_the_time_is_up(dry_run):
    run = dry_run(ENDLESS, options=("--longest", "--scan", "0.3"))
    (found,) = run.answer["longest"]
    assert (found["of"], found["ended"], found["largest"]["shape"]) == (None, "time", [150, 64])
    assert f"{found['seen']:,} of an unknown number were seen before the time was up" in run.out
    assert [each["batch"]["shape"][0] for each in found["measured"]] == [150, 100]


@warm
def test_a_data_set_that_can_be_read_only_once_is_not_lost(dry_run):
    script = ENDLESS.replace("def __iter__(self):", "numbers = iter(range(9))\n    def __iter__(self):")
    script = script.replace("while True:", "for _ in self.numbers:")
    run = dry_run(script, options=("--longest", "--to-end"))
    assert run.answer["steps"] == 9
    assert run.answer["longest"][0]["ended"] == "pass"


@warm
def test_a_loader_that_fails_late_is_read_up_to_there(dry_run):
    script = ENDLESS.replace("number += 1", "number += 1\n            if number == 20: raise OSError('gone')")
    run = dry_run(script, options=("--longest",))
    assert (run.answer["steps"], run.answer["longest"][0]["seen"]) == (4, 19)
    assert "19 of an unknown number were seen before the loader failed (OSError: gone)." in run.out


@warm
def test_batches_that_the_loader_puts_on_the_gpu_are_left_alone(dry_run):
    script = ENDLESS.replace("64)\n", "64, device='cuda')\n", 1)
    run = dry_run(script, options=("--longest",))
    assert run.answer["longest"][0]["ended"] == "gpu"
    assert "not looked through, because the loader itself puts them on the GPU." in run.out
    assert run.answer["peak"]["allocated"] == dry_run(script).answer["peak"]["allocated"]


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_while_batches_are_drawn_leaves_nothing_behind(tmp_path):
    script = ENDLESS.replace("batch_size=None", "batch_size=None, num_workers=1")
    (tmp_path / "script.py").write_text(script)
    process = start_memfit("dry-run", "--longest", "script.py", cwd=tmp_path)
    assert process.stdout.readline() == "reading\n"
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)  # ends only when the workers have closed the pipe, too
    assert process.returncode == 130
    assert "Traceback" not in error


@warm
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--scan", "5"), "--scan is the time in which --longest looks through batches: add --longest."),
        (("--longest", "--scan", "0"), "--scan must be more than 0."),
        (("--longest", "--steps", "0"), "steps must be at least 1, not 0."),
    ],
)
def test_options_that_contradict_each_other_are_refused(dry_run, options, words):
    assert words in dry_run(SCRIPT, options=options).err
