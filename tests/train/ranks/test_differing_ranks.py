"""Ranks that differ where they must not: all raise an error that says what differs, or start alike."""

import pytest
import torch

from support import differing_rank_cases

CASES = "support.differing_rank_cases"


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("plan", "Accumulation.batches_per_update is 2 on rank 0, and 3 on rank 1"),
        ("strategy", "Precision.dtype is not set on rank 0, and 'bf16' on rank 1"),
        ("loss scale", "Precision.loss_scale is LossScale(mode='static', init_scale=1.0"),
        ("mode", "Sharding.mode is 'ddp' on rank 0, and 'fsdp2' on rank 1"),
        ("norm", "max_grad_norm is None on rank 0, and 1.0 on rank 1"),
        ("retry", "retry is True on rank 0, and False on rank 1"),
        (
            "dtype",
            "'inside.weight' is (7, 6), torch.float32, trainable on rank 0, and (7, 6), torch.float64",
        ),
        (
            "frozen",
            "'head.bias' is (5,), torch.float32, trainable on rank 0, and (5,), torch.float32, frozen",
        ),
        ("rate", "optimizer.param_groups[0]['lr'] is 0.1 on rank 0, and 1.1 on rank 1"),
        ("momentum", "optimizer.param_groups[0]['momentum'] is 0.0 on rank 0, and 0.5 on rank 1"),
        ("groups", "optimizer.param_groups[0] is 1 parameters of 42 elements on rank 0, and 21 parameters"),
        ("class", "the optimizer is Adam on rank 0, and AdamW on rank 1"),
        ("rate, later", "optimizer.param_groups[0]['lr'] is 0.1 on rank 0, and 0.05 on rank 1"),
        ("resumed", "engine.optimizer_step is 0 on rank 0, and 3 on rank 1"),
        ("weights, ddp", "micro-batches have weights on 1 of the ranks and none on 1; here they have "),
        ("weights, fsdp2", "micro-batches have weights on 1 of the ranks and none on 1; here they have "),
        ("divisor", "micro-batches have weights on 1 of the ranks and none on 1; here they have "),
        ("epochs", "epochs is 1 on rank 0, and 2 on rank 1"),
        ("validated", "metrics is [] on rank 0, and ['loss'] on rank 1"),
        ("validates", "in different calls: engine.step on rank 0, and engine.validate on rank 1."),
        ("saves", "in different calls: engine.step on rank 0, and engine.save on rank 1."),
    ],
)
def test_ranks_that_differ_all_name_the_difference(two_ranks, case, says):
    for kind, message in two_ranks.run("differing", case, module=CASES):
        assert kind == "UsageError"
        assert says in message


@pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp2"])
def test_training_begins_with_the_weights_of_the_first_rank(two_ranks, mode):
    alone = differing_rank_cases.own_seeds(0, 1, mode)
    for rank in two_ranks.run("own_seeds", mode, module=CASES):
        for kind in ("parameters", "buffers"):
            for name, tensor in rank[kind].items():
                assert (tensor - alone[kind][name]).abs().max() <= 1e-6, name


def test_float32_copies_of_parameters_are_those_of_the_first_rank(two_ranks):
    precision = {"dtype": "bf16", "autocast": False, "master_weights": True}
    first, second = two_ranks.run("own_seeds", "ddp", precision, module=CASES)
    for name, tensor in first["parameters"].items():
        assert torch.equal(tensor, second["parameters"][name]), name
