"""Sizes that ranks exchange: taken to be this rank's, but for tokens that are routed to its experts."""

import pytest

from support.scripts import JOIN

pytestmark = [pytest.mark.process, pytest.mark.warm]
EXPERTS = f"""{JOIN}
    import torch.distributed._functional_collectives as funcol
    counts = torch.bincount(torch.randint(8, (512,), device="cuda"), minlength=2 * ranks)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sent = counts.view(ranks, 2).sum(1).tolist()
    received = arriving.view(ranks, 2).sum(1).tolist()
    everyone = [torch.empty_like(counts) for _ in range(ranks)]
    dist.all_gather(everyone, counts)
    gathered = torch.stack(everyone).view(ranks, ranks, 2)[:, rank]
    functional = funcol.wait_tensor(funcol.all_to_all_single(counts, None, None, dist.group.WORLD))
    print("rows", sum(sent), received, gathered.sum().item(), functional.sum().item())
    tokens = torch.empty(sum(received), 2048, device="cuda")  # 8 KiB each
    dist.all_to_all_single(tokens, torch.empty(512, 2048, device="cuda"), received, sent)
"""


def run_as_rank_1(dry_run, script, *more):
    return dry_run(script, options=("--nproc", "4", "--rank", "1", "--gpu", "H100", "--to-end", *more))


def test_sizes_that_ranks_exchange_are_those_of_this_rank(dry_run):
    script = f"""{JOIN}
    size = torch.tensor([5, 6, 7, 8], device="cuda")
    torch.randn(9, device="cuda")
    sizes = [torch.zeros_like(size) for _ in range(ranks)]
    dist.all_gather(sizes, size)
    all_sizes = torch.empty(4 * ranks, dtype=torch.int64, device="cuda")
    dist.all_gather_into_tensor(all_sizes, size)
    swapped = torch.empty_like(size)
    dist.all_to_all_single(swapped, size)
    total = size.clone()
    dist.all_reduce(total)
    print([each.tolist() for each in sizes] == [[5, 6, 7, 8]] * 4, all_sizes.tolist() == [5, 6, 7, 8] * 4)
    print(swapped.tolist(), total.tolist())
    """
    done = run_as_rank_1(dry_run, script)
    assert done.out.splitlines()[:2] == ["True True", "[6, 6, 6, 6] [20, 24, 28, 32]"], done.err


def test_a_rank_may_receive_the_tokens_of_all_ranks(dry_run):
    done = run_as_rank_1(dry_run, EXPERTS)
    assert done.out.splitlines()[0] == "rows 512 [512, 512, 512, 512] 2048 2048", done.err
    assert done.answer["peak"]["allocated"] == (4 * 512 + 512) * 8192 + 512 * 8
    assert done.answer["upper_bound"]["operator"] == "routing"
    assert "needs at most" in done.out
    (even,) = [note["text"] for note in done.answer["notes"] if "routed evenly" in note["text"]]
    assert "8.0 MiB allocated" in even  # 512 rows in, 512 rows out


def test_the_user_chooses_how_tokens_are_routed(dry_run):
    done = run_as_rank_1(dry_run, EXPERTS, "--values", "script.py:11=1024,routing=even")
    assert done.out.splitlines()[0] == "rows 512 [256, 256, 256, 256] 512 512", done.err
    assert done.answer["upper_bound"] is None
