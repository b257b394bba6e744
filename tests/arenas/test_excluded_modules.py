"""Outputs of excluded modules: readable until the next step begins, by module and by name."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import UsageError
from support.arena_training import kind_of

pytestmark = pytest.mark.usefixtures("empty_cpu_arena")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        x = torch.relu(self.norm(self.fc1(x)))
        for layer in self.layers:
            x = layer(x)
        return x


BATCH = torch.randn(3, 4)


def train(arena, model, batch=BATCH):
    with arena.train(batch):
        loss = model(batch).square().sum()
        loss.backward()
        model.zero_grad()


@pytest.mark.parametrize("by_name", [True, False])
def test_outputs_are_readable_in_the_step_and_until_the_next_one_begins(by_name):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with contextlib.closing(memfit.arena(device="cpu", exclude="1" if by_name else model[1])) as arena:
        arena.exclude_from(model)
        for number in range(6):
            batch = BATCH + number
            with arena.train(batch):
                assert arena.outputs[model[1]] == []
                model(batch).sum().backward()
                model.zero_grad()
                (output,) = arena.outputs[model[1]]
                assert output.requires_grad
                del output
            (output,) = arena.outputs["1" if by_name else model[1]]
            assert torch.equal(output, torch.relu(model[0](batch)))
            assert not output.requires_grad
            del output
            assert list(arena.outputs) == [model[1]]
            assert len(arena.outputs) == 1
        assert kind_of(arena).placed == 4
        assert kind_of(arena).unplanned == 0
    assert not arena.outputs
    assert not model[1]._forward_hooks


def test_each_call_of_a_module_is_kept():
    model = nn.Linear(4, 4)
    with memfit.arena(device="cpu", exclude=model) as arena, arena.train():
        outputs = [model(torch.ones(2, 4)), model(torch.zeros(2, 4))]
        assert list(map(id, arena.outputs[model])) == list(map(id, outputs))


def test_names_patterns_and_classes_select_modules():
    model = Net()
    with memfit.arena(device="cpu", exclude=["fc1", "layers.*", "BatchNorm1d"]) as arena:
        arena.exclude_from(model)
        train(arena, model)
        assert list(arena.outputs) == [model.fc1, model.norm, *model.layers]
        for name, module in (("fc1", model.fc1), ("norm", model.norm), ("layers.1", model.layers[1])):
            assert arena.outputs[name] == arena.outputs[module] != []


def test_the_name_of_a_parameter_or_buffer_gives_the_tensor_itself():
    model = Net()
    with memfit.arena(device="cpu", exclude=["fc1.weight", "norm.running_mean"]) as arena:
        arena.exclude_from(model)
        model.norm.running_mean = torch.zeros(4)  # as model.to() replaces buffers
        train(arena, model)
        assert arena.outputs["fc1.weight"][0] is model.fc1.weight
        assert arena.outputs["norm.running_mean"][0] is model.norm.running_mean
        assert not list(arena.outputs)


@pytest.mark.parametrize(("name", "nearest"), [("fc_1", "fc1"), ("layer.0", "layers.0")])
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    arena = memfit.arena(device="cpu", exclude=name)
    with pytest.raises(UsageError, match=rf"exclude: no module of Net .*{name}.*Nearest: .*{nearest}"):
        arena.exclude_from(Net())
    arena.close()


def test_names_without_a_model_are_refused_in_the_first_step():
    arena = memfit.arena(device="cpu", exclude=["fc1"])
    with pytest.raises(UsageError, match=r"'fc1' by name.*Call arena\.exclude_from\(model\)"):
        arena.train().__enter__()
    arena.close()


def test_a_module_that_is_not_excluded_has_no_entry():
    model = Net()
    with memfit.arena(device="cpu", exclude=["fc1", "norm.weight"]) as arena:
        arena.exclude_from(model)
        assert "fc2" not in arena.outputs
        assert model.norm not in arena.outputs
        with pytest.raises(KeyError, match=r"'fc2' is not excluded; by name: fc1, norm\.weight"):
            arena.outputs["fc2"]


def test_a_step_that_fails_keeps_no_outputs():
    model = nn.Linear(4, 4)
    with memfit.arena(device="cpu", exclude=model) as arena:
        with contextlib.suppress(ZeroDivisionError), arena.train():
            model(BATCH)
            raise ZeroDivisionError
        assert not arena.outputs


def test_a_restarted_step_keeps_only_its_last_attempt():
    model = nn.Linear(4, 4)
    with memfit.arena(device="cpu", exclude=model) as arena, arena.train():
        model(BATCH)
        arena.abandon_step(restarts=True)
        model(BATCH)
        assert len(arena.outputs[model]) == 1


def test_the_recomputation_of_a_checkpointed_block_is_not_a_call():
    model = memfit.apply(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), memfit.Checkpointing("0"))
    with memfit.arena(device="cpu", exclude="0.0") as arena:
        arena.exclude_from(model)
        train(arena, model)
        assert len(arena.outputs["0.0"]) == 1


def test_outputs_are_kept_where_steps_are_not_placed():
    model = nn.Linear(4, 4)
    with memfit.arena(device="cpu", optimize_test=False, exclude=model) as arena:
        with arena.test(BATCH):
            model(BATCH)
        assert len(arena.outputs[model]) == 1


def test_an_arena_keeps_no_model_alive():
    model = Net()
    gone = weakref.ref(model.fc1)
    with memfit.arena(device="cpu", exclude=["fc1", "fc1.weight"]) as arena:
        arena.exclude_from(model)
        with arena.train():
            pass
        del model
        gc.collect()
        assert gone() is None
        assert arena.outputs["fc1.weight"] == []
        second = Net()
        arena.exclude_from(second)
        train(arena, second)
        assert len(arena.outputs["fc1"]) == 1
