"""Objects that only another rank has: memfit runs that rank, too, up to there."""

import pytest

from support.scripts import JOIN

pytestmark = [pytest.mark.process, pytest.mark.warm]


def run_as(dry_run, script, rank, nproc, *more):
    options = ("--nproc", f"{nproc}", "--rank", f"{rank}", "--gpu", "H100", "--to-end", *more)
    return dry_run(script, options=options)


def test_a_rank_receives_what_others_really_send(dry_run):
    script = f"""{JOIN}
    names = [f"run of {{rank}}", None] if rank == 0 else [None, None]
    dist.broadcast_object_list(names, src=0)
    settings = [{{"width": 8}} if rank == 0 else {{}}]  # as PyTorch broadcasts a state dict
    dist.broadcast_object_list(settings, src=0)
    part = [None]
    dist.scatter_object_list(part, [each * 10 for each in range(ranks)] if rank == 2 else None, src=2)
    if rank == 0:
        dist.send_object_list([{{"width": 384}}], dst=1)
    if rank == 1:
        received = [None]
        dist.recv_object_list(received, src=0)
        print(names, settings, part, received)
        torch.empty(received[0]["width"], 1024, device="cuda")
    """
    done = run_as(dry_run, script, 1, 3)
    said = "['run of 0', None] [{'width': 8}] [10] [{'width': 384}]"
    assert done.out.splitlines()[0] == said, done.err
    assert done.answer["peak"]["allocated"] == 384 * 1024 * 4


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_are_named(dry_run):
    script = f"""{JOIN}
    dist.recv_object_list([None], src=1 - rank)
    """
    done = run_as(dry_run, script, 0, 2)
    assert done.code == 3
    assert "but the ranks 0, 1 wait for each other." in done.err


@pytest.mark.slow
def test_stages_of_a_pipeline_infer_the_shapes_that_their_neighbours_send(dry_run):
    script = f"""{JOIN}
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    device = torch.device("cuda", rank)
    widths = [64, 512, 256, 128]  # each stage passes on another shape
    part = nn.Linear(widths[rank], widths[rank + 1], bias=False).to(device)
    stage = PipelineStage(part, rank, ranks, device)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    schedule.step(*[torch.ones(4096, 64, device=device)][: rank == 0],
                  target=torch.ones(4096, 128, device=device) if rank == 2 else None)
    print(tuple(part.weight.grad.shape), [tuple(each.buffer.shape) for each in stage.args_recv_info[0]])
    """
    done = run_as(dry_run, script, 1, 3)
    assert done.out.splitlines()[0] == "(256, 512) [(1024, 512)]", done
