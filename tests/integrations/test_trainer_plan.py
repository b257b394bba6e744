"""What of a plan becomes a setting of a trainer, and what is refused by name."""

import json

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import UsageError
from memfit.integrations.trainer_plan import TrainerPlan, WindowLossDivider


def plan(**settings):
    return TrainerPlan.of(settings, "Lightning")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"batches_per_update": 2, "gradient_dtype": "float32"}, "gradient_dtype='float32'"),
        ({"batches_per_update": 2, "remainder": "drop"}, "remainder='drop'"),
        ({"parts_per_batch": 4}, "batches_per_update=4"),
        ({"precision": {"dtype": "bf16", "autocast": False}}, "autocast=False"),
        ({"sharding": {"mode": "fsdp2"}}, "sharding 'fsdp2'"),
        ({"arena": {"optimize_train": True}}, "the settings of the arena"),
    ],
)
def test_what_a_trainer_cannot_do_is_refused_by_name(settings, named):
    with pytest.raises(UsageError, match="Lightning cannot do this part of the plan") as refusal:
        plan(**settings)
    assert named in str(refusal.value)


def test_divided_batches_become_smaller_batches_of_the_loader():
    made = TrainerPlan.of({"parts_per_batch": 4}, "Trainer", 32)
    assert (made.batches_per_update, made.batch_size) == (4, 8)
    made.expect_loader(torch.utils.data.DataLoader([0] * 8, batch_size=8))
    with pytest.raises(UsageError, match="Create the loader with batch_size=8"):
        made.expect_loader(torch.utils.data.DataLoader([0] * 32, batch_size=32))


@pytest.mark.parametrize("size", [3, 30])
def test_parts_that_are_not_equal_are_refused(size):
    with pytest.raises(UsageError, match="parts that are not equal"):
        TrainerPlan.of({"parts_per_batch": 4}, "Trainer", size)


def test_a_plan_file_says_how_large_batches_are(tmp_path):
    file = tmp_path / "plan.json"
    divided = {"count": 4, "size": 2, "how": "--batch-size 2, now 8", "where": ""}
    file.write_text(json.dumps({"plan": {"accumulation": {"parts_per_batch": 4}}, "micro_batches": divided}))
    made = TrainerPlan.of(file, "Lightning")
    assert (made.batches_per_update, made.batch_size) == (4, 2)


def test_a_plan_whose_allocator_settings_are_not_set_is_refused_with_what_to_set(tmp_path, monkeypatch):
    file = tmp_path / "plan.json"
    conf = "expandable_segments:True,max_split_size_mb:128"
    file.write_text(json.dumps({"plan": {}, "allocator": conf}))
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    for given in ("", "expandable_segments:True"):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", given)
        with pytest.raises(UsageError, match=f"Set PYTORCH_ALLOC_CONF={conf} in front of the command"):
            TrainerPlan.of(file, "Lightning")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"backend:native,{conf}")
    assert TrainerPlan.of(file, "Lightning").changes == memfit.Plan()


def test_a_plan_for_a_fused_optimizer_refuses_another(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"plan": {}, "fused": True}))
    model = nn.Linear(2, 2)
    made = TrainerPlan.of(file, "Lightning")
    with pytest.raises(UsageError, match="Create AdamW with fused=True"):
        made.apply_to_optimizer(torch.optim.AdamW(model.parameters()), [model])
    made.apply_to_optimizer(torch.optim.AdamW(model.parameters(), fused=True), [model])


def test_changes_of_the_model_are_what_is_left_of_the_plan():
    made = plan(batches_per_update=2, precision="bf16", checkpointing=["0"], max_grad_norm=1.0)
    assert made.changes == memfit.Plan(checkpointing=memfit.Checkpointing(["0"]))
    assert (made.dtype, made.max_grad_norm) == ("bf16", 1.0)


def gradient(divisor, factors, weights=None, *, close=True):
    """Return the gradient of a parameter after a window whose losses are the parameter times each factor."""
    parameter = nn.Parameter(torch.ones(()))
    for index, factor in enumerate(factors):
        root = divisor.divided(parameter * factor, None if weights is None else weights[index])
        if root is not None:
            root.backward()
    if close:
        divisor.close([parameter])
    return parameter.grad.item()


def test_a_partial_window_is_divided_by_its_own_number_of_batches():
    divisor = WindowLossDivider(4)
    assert gradient(divisor, [1.0, 2.0, 3.0, 6.0]) == 3.0
    assert gradient(divisor, [1.0, 2.0]) == 1.5
    assert gradient(divisor, [1.0, 2.0], close=False) == 0.75  # what a trainer's own divisor makes of it


def test_batches_count_by_their_weights():
    divisor = WindowLossDivider(4)
    assert gradient(divisor, [1.0, 2.0, 4.0], [1, 3, 0]) == 7 / 4


def test_only_some_weights_are_refused():
    divisor = WindowLossDivider(4)
    divisor.divided(torch.ones((), requires_grad=True), 1.0)
    with pytest.raises(UsageError, match="some micro-batches have a weight"):
        divisor.divided(torch.ones((), requires_grad=True))


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "mmengine.hooks", None)
    monkeypatch.delitem(sys.modules, "memfit.integrations.mmengine", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'memfit\[mmengine\]'"):
        _ = memfit.mmengine
