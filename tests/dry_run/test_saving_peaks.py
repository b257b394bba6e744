"""What saving takes on top of a rank's shards, against the figures that follow from the shapes."""

import pytest

from support.scripts import JOIN

pytestmark = [pytest.mark.process, pytest.mark.warm]

RANKS, COLUMNS, ROWS = 4, 1024, (1024, 4096, 2048)
PARAMETERS = [rows * COLUMNS * 4 for rows in ROWS]
SHARDS = sum(PARAMETERS) // RANKS

SAVE = f"""{JOIN}
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    model = nn.Sequential(*[nn.Linear({COLUMNS}, rows, bias=False) for rows in {ROWS}]).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)

    def peak_of(save):
        torch.cuda.reset_peak_memory_stats()
        kept = save()
        print("peak", torch.cuda.max_memory_allocated(), len(kept))

    def full(cpu_offload):
        options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
        return get_model_state_dict(model, options=options)

    def sharded():
        checkpoint.save(get_model_state_dict(model), checkpoint_id="saved")
        return ()

    peak_of(sharded)
    peak_of(lambda: full(True))
    peak_of(lambda: full(False))
"""


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_saving_takes_nothing_or_a_gathered_parameter_or_the_whole_model(dry_run, rank):
    done = dry_run(SAVE, options=("--gpu", "H100", "--nproc", f"{RANKS}", "--rank", f"{rank}", "--to-end"))
    assert [line.split()[1:] for line in done.out.splitlines() if line.startswith("peak")] == [
        [f"{SHARDS}", "0"],  # each rank writes its own shards
        [f"{SHARDS + max(PARAMETERS)}", f"{len(ROWS) * (rank == 0)}"],  # rank 0 copies one after another
        [f"{SHARDS + sum(PARAMETERS)}", f"{len(ROWS)}"],
    ], done.err
    assert done.answer["peak"]["allocated"] == SHARDS + sum(PARAMETERS)
    assert done.answer["peak"]["line"].endswith("script.py:23")  # in full()
    terms = {row["name"]: row["bytes"] for row in done.answer["terms"]}
    assert (terms["parameters"], terms["communication"]) == (SHARDS, sum(PARAMETERS))
