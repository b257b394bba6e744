"""Six examples for one GPU under several ranks: the losses and weights of one process, and the ghost's peaks.

Losses are compared in float64 and without dropout, which each rank draws for itself: what remains is the
order of sums. Peaks are compared to the byte: `dry-run --nproc N --plan`, in which one process after the
other stands for a rank, with N processes that train, each on a ghost of its own. In both, collectives have
released their tensors at the end of a step, as on a card. A ghost carries no contents, so the optimizer state
that another rank sends for a checkpoint (ZeRO-1) is assumed in both.
"""

import json
import re
import textwrap
from pathlib import Path

import pytest
import torch

from script_training.conftest import GPU
from support.new_processes import run_python

pytestmark = [
    *(pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1800)),
    pytest.mark.parametrize("ranks", [2, 4]),
    pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp2"]),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {
    "accumulation.py": "--micro-batch-size 5 --gradient-accumulation-steps 2 --sequence-length 8 --steps 2",
    "gpt.py": "--batch-size 5 --context 16 --steps 2",
    "longest_batch.py": "--sentences 24 --batch-size 7 --width 32",
    "lstm.py": "--steps 2 --batch-size 6 --length 8",
    "mlp.py": "--epochs 1 --batch-size 300 --hidden 64",
    "whole_run.py": "--epochs 1 --samples 150 --eval-samples 40",
}
SECONDS = 900  # four GPTs in float64 take minutes, and 20 GB
SCRIPT = """
    import runpy, sys, torch
    from torch import nn
    from torch.optim.optimizer import register_optimizer_step_post_hook

    losses, trained = [], []
    item = torch.Tensor.item

    def noted(tensor):
        value = item(tensor)
        if sys._getframe(1).f_code.co_filename == sys.argv[0]:
            losses.append(value)
        return value

    def note(optimizer, *_):
        if not any(optimizer is each for each in trained):
            trained.append(optimizer)

    def without_dropout(lstm, *args, init=nn.LSTM.__init__, **kwargs):
        init(lstm, *args, **kwargs | {"dropout": 0.0})

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **others):
        return attend(q, k, v, attn_mask, 0.0, is_causal, **others)

    def to(model, *places, original=nn.Module.to, **named):
        return original(model, *[each for each in places if each is not torch.float32], **named)

    if "mlp.py" not in sys.argv[1]:  # which makes float32 of its images itself
        torch.set_default_dtype(torch.float64)
        nn.Module.to = to
    torch.Tensor.item, nn.LSTM.__init__ = noted, without_dropout
    attend, nn.functional.scaled_dot_product_attention = nn.functional.scaled_dot_product_attention, attention
    nn.functional.dropout = lambda x, *_, **__: x
    register_optimizer_step_post_hook(note)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    whole = [[each for group in one.param_groups for each in group["params"]] for one in trained]
    weights = max(whole, key=len)  # ZeRO-1 steps an optimizer of this rank's parameters inside
    torch.save({"losses": losses, "weights": [each.detach() for each in weights]}, "trained.pt")
"""


PEAKS = """
    import atexit, contextlib, runpy, sys, torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from memfit.ghost.ranks.collective_release_times import wait_until_collectives_released
    from memfit.ghost.ranks.join_and_pipeline_agreements import assume_ranks_agree_with_this_one

    assume_ranks_agree_with_this_one(contextlib.nullcontext)
    register_optimizer_step_post_hook(lambda *_: wait_until_collectives_released())
    atexit.register(lambda: print("peak", *peak(), file=sys.stderr))
    peak = lambda: (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a function that returns what an example trains as one process."""
    known = {}

    def train(script):
        if script not in known:
            folder = tmp_path_factory.mktemp("alone")
            (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
            path = Path(__file__).with_name("cpu")
            command = ["script.py", EXAMPLES / script, *SCRIPTS[script].split()]
            variables = {"PYTHONPATH": str(path), "MEMFIT_TEST_DIGEST": "/dev/null"}
            done = run_python(*command, cwd=folder, **variables)
            assert done.returncode == 0, done.stderr
            known[script] = torch.load(folder / "trained.pt")
        return known[script]

    return train


@pytest.mark.parametrize("script", SCRIPTS)
def test_losses_and_weights_are_those_of_one_process(
    train_on, plan_file, tmp_path, alone, script, mode, ranks
):
    plan = plan_file({"sharding": {"mode": mode}})
    trained = train_on(ranks, SCRIPT, plan, EXAMPLES / script, *SCRIPTS[script].split(), timeout=SECONDS)
    assert [each.code for each in trained] == [0] * ranks, trained[0].err[-3000:]
    found, wanted = torch.load(tmp_path / "trained.pt"), alone(script)
    assert len(found["losses"]) == len(wanted["losses"])
    assert found["losses"] or script == "longest_batch.py"  # which reads none
    gaps = [abs(one - other) for one, other in zip(found["losses"], wanted["losses"], strict=True)]
    assert max(gaps, default=0) <= 1e-6
    pairs = zip(found["weights"], wanted["weights"], strict=True)
    furthest = max(float((one - other).abs().max()) for one, other in pairs)
    print(f"{script} {mode} {ranks}: losses {max(gaps, default=0):.1e}, weights {furthest:.1e}")
    assert furthest <= 1e-6


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_peak_of_each_rank_is_that_of_the_dry_run(
    python, train_on, plan_file, tmp_path, script, mode, ranks
):
    plan = plan_file({"sharding": {"mode": mode}})
    command = (EXAMPLES / script, *SCRIPTS[script].split())
    options = ("--nproc", ranks, "--all-ranks", "--gpu", GPU, "--to-end", "--plan", plan)
    predicted = python("-m", "memfit", "dry-run", *options, "--json", "run.json", "--", *command, on="")
    assert predicted.code == 0, predicted.err[-3000:]
    rows = json.loads((tmp_path / "run.json").read_text())["ranks"]
    peaks = {rank: row["peak"] for row in rows for rank in (row["rank"], *row["also"])}
    trained = train_on(ranks, PEAKS, plan, *command, on="ghost", timeout=SECONDS)
    assert [each.code for each in trained] == [0] * ranks, trained[0].err[-3000:]
    for rank, each in enumerate(trained):
        (found,) = re.findall(r"^peak (\d+) (\d+)$", each.err, re.MULTILINE)
        wanted = [peaks[rank][size] for size in ("allocated", "reserved")]
        assert [{"least": int(size), "most": int(size)} for size in found] == wanted, rank
