"""Where streams race, a run's peak is a range: work on side streams is done at once, or as late as can be."""

import pytest

from support.scripts import LATE_FREES

pytestmark = pytest.mark.warm

MIB = 1 << 20
RACE = """
    import ctypes, random, torch
    random.seed(SEED)
    hold = ctypes.CDLL("libcudart.so.13").ghost_hold_events if SEED else None
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    model = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(3):
        for _ in range(8):
            if hold:
                hold(random.choice([0, 2, 2, 2]))
            with torch.cuda.stream(side):
                x = torch.empty(20 << 20, dtype=torch.uint8, device="cuda")
            x.record_stream(main)
            del x
            WAIT
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
        optimizer.step()
        if hold:
            hold(0)  # the bounds, too, are within the step
"""


def racing(dry_run, *, seed=0, wait="pass", script=RACE, options=()):
    run = dry_run(script.replace("SEED", str(seed)).replace("WAIT", wait), options=options)
    assert run.code == 0, run.err
    return run


def test_memory_of_a_side_stream_that_nothing_waits_for_is_a_range(dry_run):
    answer = racing(dry_run).answer
    reserved = answer["range"]["reserved"]
    assert reserved["most"] - reserved["least"] == 7 * 20 * MIB  # eight buffers in place of one
    assert answer["peak"]["reserved"] == reserved["most"]
    assert answer["range"]["allocated"]["least"] == answer["range"]["allocated"]["most"]
    terms = {row["name"]: row["provenance"] for row in answer["terms"]}
    assert (terms["allocated"], terms["reserved"]) == ("exact", "assumed")


@pytest.mark.parametrize("wait", ["side.wait_stream(main); side.synchronize()", "main.query()"])
def test_where_the_host_waits_for_the_stream_the_bounds_meet(dry_run, wait):
    answer = racing(dry_run, wait=wait).answer
    assert answer["range"] is None
    assert {row["name"]: row["provenance"] for row in answer["terms"]}["reserved"] == "exact"


@pytest.mark.slow
def test_work_that_finishes_at_random_moments_lies_between_the_bounds(dry_run):
    bounds = racing(dry_run).answer["range"]["reserved"]
    found = set()
    for seed in (1, 2, 3):
        answer = racing(dry_run, seed=seed).answer
        drawn = answer["range"]["reserved"]["least"] if answer["range"] else answer["peak"]["reserved"]
        found.add(drawn)
    assert all(bounds["least"] <= size <= bounds["most"] for size in found)
    assert found - set(bounds.values()), "no seed drew a moment between the earliest and the latest"


def test_a_block_of_the_main_stream_that_is_freed_late_is_found_on_one_stream_too(dry_run):
    reserved = racing(dry_run, script=LATE_FREES).answer["range"]["reserved"]
    assert (reserved["least"], reserved["most"]) == (60 * MIB, 120 * MIB)


HELD = """
    import torch
    from torch import distributed
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl")
    own = [torch.empty(10 << 18, device="cuda") for _ in range(4)]
    works = []
    for part in own:
        padded = torch.empty(20 << 18, device="cuda")
        works.append((distributed.reduce_scatter_tensor(part, padded, async_op=True), padded))
        works[-1:] = [works[-1][:KEPT]]
        DROPPED
    for work, *_ in works:
        work.wait()
"""
DROPPED = HELD.replace("KEPT", "1").replace("DROPPED", "del padded")


@pytest.mark.parametrize(
    ("script", "difference"),
    [
        (DROPPED, 3 * 20 * MIB),
        (
            DROPPED.replace("[:1]", "[:0]").replace("for work, *_ in works:\n        work.wait()", ""),
            3 * 20 * MIB,
        ),
        (HELD.replace("KEPT", "2").replace("DROPPED", ""), 0),
    ],
    ids=["dropped", "dropped with its handle", "held"],
)
def test_what_a_collective_holds_is_a_range_unless_the_script_holds_it_too(dry_run, script, difference):
    answer = dry_run(script, options=("--nproc", "2")).answer
    most = (4 * 10 + 4 * 20) * MIB
    if difference:
        assert answer["range"]["allocated"] == {"least": most - difference, "most": most}
    else:
        assert (answer["range"], answer["peak"]["allocated"]) == (None, most)


REDUCED = """
    import torch
    from torch import distributed, nn
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl")
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(4)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).cuda())
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(BACKWARDS):
            model(torch.randn(8, 1024, device="cuda")).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("backwards", "gradients"), [(1, 0), (2, 4 * 4 * MIB)])
def test_first_buckets_that_a_step_reduces_and_rebuilds_are_held_as_long_as_the_gpu_takes(
    dry_run, backwards, gradients
):
    script = REDUCED.replace("BACKWARDS", str(backwards))
    answer = dry_run(script, options=("--nproc", "2", "--to-end")).answer
    if gradients:
        allocated = answer["range"]["allocated"]
        assert allocated["most"] - allocated["least"] == gradients
        assert answer["peak"]["allocated"] == allocated["most"]
    else:
        assert answer["range"] is None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_where_memory_is_short_pytorch_waits_for_streams(dry_run, seed):
    """The script needs what it takes if all work is done at once, and runs on a GPU of that size."""
    known = racing(dry_run)
    process = known.answer["range"]["process"]
    assert f"needs at most {process['least'] / 2**30:.2f} GiB" in known.out
    small = racing(dry_run, seed=seed, options=("--memory", f"{-(-process['least'] // MIB)}MiB"))
    assert small.answer["verdict"] == "tight"
    assert small.answer["peak"]["process"] <= process["least"]


@pytest.mark.slow
def test_what_does_not_fit_at_the_lower_bound_needs_at_least_that(dry_run):
    """No second run has found how much more it needs with collectives that hold their tensors."""
    least = racing(dry_run).answer["range"]["process"]["least"]
    script = RACE.replace("SEED", "0").replace("WAIT", "pass")
    small = dry_run(script, options=("--memory", f"{least // MIB - 4}MiB"))
    needs = f"needs at least {least // MIB} MiB; this GPU has {least // MIB - 4} MiB"
    assert small.out.startswith(f"OUT OF MEMORY   {needs}")
    assert small.answer["needs"]["bytes"] == least


@pytest.mark.slow
def test_what_fits_at_the_lower_bound_alone_may_not_fit(dry_run):
    """A collective holds its tensors until the script waits for it, however short memory is."""
    process = dry_run(DROPPED, options=("--nproc", "2")).answer["range"]["process"]
    between = (process["least"] + process["most"]) // 2
    small = dry_run(DROPPED, options=("--nproc", "2", "--memory", f"{between // MIB}MiB", "--fail"))
    assert (small.code, small.answer["verdict"]) == (1, "may not fit")
    assert f"MAY NOT FIT   needs at most {process['most'] / 2**30:.2f} GiB; this GPU has" in small.out


@pytest.mark.slow
def test_a_run_is_incomplete_if_the_second_one_that_finds_its_largest_need_fails(dry_run):
    only_once = "        step != 1 or open('once', 'x')\n        model("
    script = RACE.replace("SEED", "0").replace("WAIT", "pass").replace("        model(", only_once)
    run = dry_run(script)
    assert (run.code, run.answer["verdict"], run.answer["end"]["reason"]) == (3, "unknown", "steps")
    assert run.out.startswith("INCOMPLETE   needs ")
    assert "The second run, which measures that, did not complete: the script ended with File" in run.out
    assert "FileExistsError" in run.answer["untried"]["exception"]
