"""Loops that differ from the examples: two optimizers, batches left out, a second fit, 8-bit state."""

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import UsageError
from memfit.integrations.trainer_plan import TrainerPlan

pytestmark = pytest.mark.process  # the packages take seconds to import


def layer():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model):
    return model(torch.ones(2, 4)).mean()


@pytest.mark.parametrize("trainer", ["Accelerate", "Lightning", "MMEngine", "Trainer"])
def test_clipping_and_steps_in_the_backward_are_refused_in_every_trainer(trainer):
    with pytest.raises(UsageError, match="step_in_backward and max_grad_norm cannot be combined"):
        TrainerPlan.of({"optimizer_state": {"step_in_backward": True}, "max_grad_norm": 1.0}, trainer)


def test_float16_on_a_cpu_is_refused_where_a_trainer_would_train_in_float32(tmp_path):
    from transformers import Trainer, TrainingArguments

    plan = {"precision": "fp16"}
    with pytest.raises(UsageError, match="Accelerate would silently train in float32"):
        memfit.accelerate.Accelerator(plan, cpu=True)
    arguments = TrainingArguments(tmp_path, use_cpu=True, **memfit.transformers.arguments(plan))
    with pytest.raises(UsageError, match="Trainer would silently train in float32"):
        Trainer(layer()[0], arguments, callbacks=[memfit.transformers.PlanTrainerCallback(plan)])


def test_accelerate_trains_two_models_with_two_backwards_if_nothing_is_accumulated():
    accelerator = memfit.accelerate.Accelerator({}, cpu=True)
    (one, steps_one), (two, steps_two) = layer(), layer()
    one, steps_one, two, steps_two = accelerator.prepare(one, steps_one, two, steps_two)
    before = two.weight.detach().clone()
    with accelerator.accumulate(one, two):
        for model, optimizer in ((one, steps_one), (two, steps_two)):
            accelerator.backward(loss_of(model))
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(one.weight, two.weight)
    assert not torch.equal(two.weight, before)


def test_accelerate_names_a_window_whose_last_backward_is_missing():
    accelerator = memfit.accelerate.Accelerator({"batches_per_update": 2}, cpu=True)
    model, optimizer = accelerator.prepare(*layer())
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model))
    with pytest.raises(UsageError, match="weight=0"), accelerator.accumulate(model):
        optimizer.step()


def test_mmengine_applies_the_plan_to_the_model_of_each_wrapper_of_a_dict():
    from mmengine.optim import OptimWrapperDict

    model, optimizer = layer()
    wrapper = memfit.mmengine.PlanOptimWrapper(optimizer, {"optimizer_state": {"step_in_backward": True}})
    wrappers = OptimWrapperDict(generator=wrapper)
    wrappers.initialize_count_status(model, 0, 10)  # which MMEngine leaves to each wrapper
    with pytest.raises(UsageError, match="optim_context"):
        wrapper.update_params(loss_of(model))
    before = model.weight.detach().clone()
    for _ in range(2):
        with wrapper.optim_context(model):
            loss = loss_of(model)
    loss.backward()
    assert not torch.equal(model.weight, before)  # stepped in the backward: the plan is applied


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_lightning_fits_a_module_again(tmp_path):
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    model = BoringModel()
    model.layer = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 2))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    for _ in range(2):
        plan = memfit.lightning.arguments({"checkpointing": ["layer"], "batches_per_update": 2})
        trainer = Trainer(fast_dev_run=2, accelerator="cpu", default_root_dir=tmp_path, **quiet, **plan)
        trainer.fit(model)
        trainer.fit(model)
    memfit.apply(model, {"checkpointing": ["layer"]})  # no plan is left on it


@pytest.mark.slow
def test_the_estimate_of_a_trainer_has_the_optimizer_of_its_plan(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    plan = {"optimizer_state": {"bits": 8}}
    settings = memfit.transformers.arguments(plan) | {"report_to": [], "dataloader_pin_memory": False}
    arguments = TrainingArguments(str(tmp_path), **settings)
    callbacks = [memfit.transformers.PlanTrainerCallback(plan)]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=1, n_head=2))
    rows = [dict.fromkeys(("input_ids", "labels"), torch.arange(64))] * 8
    trainer = Trainer(model, arguments, None, rows, callbacks=callbacks)
    estimate = memfit.transformers.estimate(trainer)
    of_state = estimate.breakdown["optimizer state"].bytes
    assert of_state < 4 * model.num_parameters()  # in 32 bits: 8 bytes each
    assert trainer.optimizer is None
    assert "bitsandbytes" not in type(trainer.create_optimizer()).__module__


@pytest.mark.slow
def test_trainer_resumes_under_a_plan_as_if_it_had_gone_on(tmp_path):
    from transformers import Trainer, TrainingArguments

    class Regression(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

        def forward(self, features, labels):
            return {"loss": (self.layers(features) - labels).square().mean()}

    def trained(checkpoint=None):
        plan = {"checkpointing": ["layers"], "batches_per_update": 2}
        settings = memfit.transformers.arguments(plan) | {"report_to": [], "save_steps": 3, "use_cpu": True}
        arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=2, **settings)
        callbacks = [memfit.transformers.PlanTrainerCallback(plan)]
        trainer = Trainer(Regression(), arguments, None, rows, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer.model.state_dict(), trainer.state.global_step

    features = torch.randn(14, 4)  # 7 batches, and so windows of 2, 2, 2 and 1 in each epoch
    rows = [{"features": row, "labels": row.sum().view(1)} for row in features]
    parameters, steps = trained()
    resumed, steps_in_all = trained(str(tmp_path / "checkpoint-3"))
    assert steps == steps_in_all == 12
    assert all(torch.equal(resumed[name], parameters[name]) for name in parameters)
