"""Host memory that optimizers hold without pinning it."""

import pytest
import torch

from memfit.recording.host_tensors import HostTensors

pytestmark = pytest.mark.warm


def test_parameters_gradients_and_state_count_once_and_the_largest_sum_stays():
    host, flat = HostTensors(), torch.zeros(1000)
    first, second = (torch.nn.Parameter(part) for part in flat.view(2, 500))
    optimizer = torch.optim.Adam([first, second])
    first.grad = torch.zeros_like(first)
    optimizer.step()
    host.after_step(optimizer)
    assert host.peak == 4 * (1000 + 3 * 500)  # the step counts are numbers
    host.hold("buffer", [torch.zeros(10), flat])
    assert host.peak == 4 * (1000 + 3 * 500 + 10)
    host.hold("buffer", [])
    assert host.peak == 4 * (1000 + 3 * 500 + 10)


def test_an_optimizer_on_the_host_has_a_line_and_the_ranks_of_its_machine_another(dry_run):
    script = """
        import torch

        torch.distributed.init_process_group("nccl")
        share = torch.nn.Parameter(torch.zeros(1 << 20))
        optimizer = torch.optim.Adam([share])
        for _ in range(2):
            share.to("cuda").sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    run = dry_run(script, options=("--nproc", "4", "--rank", "1"))
    assert run.code == 0, run.err
    assert run.answer["unpinned"]["bytes"] == 16 << 20
    assert run.answer["rank"] == {"rank": 1, "world_size": 4, "nproc": 4}
    assert "Optimizers in other host memory: 16.0 MiB (exact" in run.out
    assert "Host memory of 4 such ranks, on one machine: 64.0 MiB." in run.out


def test_of_a_parameter_in_shards_the_piece_of_this_rank_counts():
    class Shard(torch.nn.Parameter):
        _local_tensor = torch.zeros(1000)

        def untyped_storage(self):
            raise RuntimeError("Attempted to access the data pointer on an invalid python storage.")

    found = HostTensors()
    found.hold("shards", [Shard(torch.zeros(4000))])
    assert found.peak == 4000
