"""A live model serialised and recreated in one process: what is kept, and which objects are refused."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from memfit.errors import NotSentError, UsageError
from memfit.estimating.serialise_training_step import (
    collect_training_step,
    deserialise_training_step,
    serialise_training_step,
    set_torch_backend_flags,
    torch_backend_flags,
)


def round_trip(model, inputs=None, loss=None, optimizer=None):
    """Return a training step serialised and recreated, and the modules to move."""
    return deserialise_training_step(
        serialise_training_step(collect_training_step(model, inputs, loss, optimizer, 3)).data
    )


def memory(tensor):
    return tensor.untyped_storage()._cdata


def test_shapes_dtypes_and_modes_are_kept_but_not_large_values():
    model = nn.Sequential(nn.Linear(64, 64).bfloat16(), nn.BatchNorm1d(64), nn.Dropout()).eval()
    model[0].bias.requires_grad_(False)
    copy = round_trip(model)[0].model
    for name, tensor in model.state_dict(keep_vars=True).items():
        other = copy.state_dict(keep_vars=True)[name]
        assert type(other) is type(tensor)
        assert (other.shape, other.dtype, other.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
        assert other.requires_grad == tensor.requires_grad
    assert not any(module.training for module in copy.modules())
    assert not copy[0].weight.any()
    assert torch.equal(copy[0].bias, model[0].bias)  # small: kept


def test_small_buffers_that_decide_sizes_keep_their_values():
    model = nn.Linear(2, 2)
    model.register_buffer("offsets", torch.tensor([3, 1, 4]))
    model.register_buffer("nothing", torch.empty(0, 7))
    copy = round_trip(model)[0].model
    assert copy.offsets.tolist() == [3, 1, 4]
    assert copy.nothing.shape == (0, 7)


def test_a_large_model_is_serialised_in_few_bytes():
    model = nn.Linear(1 << 20, 1 << 10, device="meta")  # 4 GiB
    packed = serialise_training_step(collect_training_step(model, None, None, None, 3))
    assert len(packed.data) < 10_000


def test_tied_weights_stay_tied_and_views_stay_views():
    model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 100, bias=False))
    model[1].weight = model[0].weight
    model.rows = model[0].weight.detach()[5:15]
    model.columns = model[0].weight.detach().t()
    copy = round_trip(model)[0].model
    assert copy[1].weight is copy[0].weight
    assert memory(copy.rows) == memory(copy.columns) == memory(copy[0].weight)
    assert (copy.rows.shape, copy.rows.storage_offset()) == ((10, 32), 5 * 32)
    assert copy.columns.stride() == (1, 32)


def test_hooks_are_kept_including_those_on_gradients():
    model = nn.Linear(4, 4)
    model.calls = []
    model.register_forward_hook(lambda module, _inputs, _output: module.calls.append("forward"))
    model.weight.register_hook(lambda _gradient: model.calls.append("gradient"))
    model.weight.register_post_accumulate_grad_hook(lambda _parameter: model.calls.append("accumulated"))
    copy = round_trip(model)[0].model
    copy(torch.ones(1, 4)).sum().backward()
    assert copy.calls == ["forward", "gradient", "accumulated"]
    assert model.calls == []


@pytest.mark.parametrize("change", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_modules_work_as_before(change):
    model = change(nn.Linear(4, 4))
    copy = round_trip(model)[0].model
    assert torch.equal(copy(torch.ones(1, 4)), model(torch.ones(1, 4)))
    assert {name for name, _ in copy.named_parameters()} == {name for name, _ in model.named_parameters()}


def test_a_compiled_model_is_compiled_again():
    model = torch.compile(nn.Linear(4, 4), backend="eager")
    copy = round_trip(model)[0].model
    assert type(copy) is type(model)
    assert copy._orig_mod.weight.shape == (4, 4)


def test_tensor_subclasses_with_tensor_flatten_are_kept():
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.zeros(4, 4)))
    copy = round_trip(model)[0].model.weight
    assert isinstance(copy, TwoTensor)
    assert isinstance(copy, nn.Parameter)
    assert torch.equal(copy.a, torch.ones(4, 4))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
        (torch.optim.Adagrad, {"lr": 0.5}),  # creates its state in its constructor
        (torch.optim.Adam, {"lr": torch.tensor(0.1), "capturable": True}),
    ],
)
def test_optimizers_are_recreated_on_the_copied_parameters(kind, options):
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), **options)
    step, _ = round_trip(model, optimizer=optimizer)
    copy = step.optimizer.make()
    assert type(copy) is kind
    assert copy.defaults == optimizer.defaults
    assert [id(p) for p in copy.param_groups[0]["params"]] == [id(p) for p in step.model.parameters()]
    assert set(vars(copy)) == set(vars(optimizer))
    assert len(copy.state) == len(optimizer.state)  # Adagrad's two, created with it


def test_groups_keep_their_settings_and_the_copy_has_no_scheduler():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    copy = round_trip(model, optimizer=optimizer)[0].optimizer.make()
    assert [group["lr"] for group in copy.param_groups] == [0.5, 0.001]
    assert "step" not in vars(copy)


class Unusual(torch.optim.Optimizer):
    """An optimizer whose defaults are not the arguments of its constructor."""

    def __init__(self, parameters, pace):
        super().__init__(parameters, {"lr": pace / 2})
        self.pace = pace


def test_an_optimizer_whose_defaults_are_not_its_arguments_is_recreated():
    model = nn.Linear(4, 4)
    copy = round_trip(model, optimizer=Unusual(model.parameters(), 3))[0].optimizer.make()
    assert (type(copy), copy.pace, copy.param_groups[0]["lr"]) == (Unusual, 3, 1.5)


def test_every_module_is_moved_including_one_in_a_closure():
    model, teacher = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
    step, roots = round_trip(model, loss=lambda m, x: (m(x) - teacher(x)).sum())
    assert [type(root) for root in roots] == [nn.Sequential, nn.Linear]
    assert roots[0] is step.model


def test_python_modules_of_a_custom_type_are_imported_by_the_receiver():
    code = "def loss(model, x): return torch.backends.cudnn.enabled, model(x)"
    interactive = {"__name__": "__main__", "torch": torch}
    exec(code, interactive)  # noqa: S102 - like a notebook's cell
    step, _ = round_trip(nn.Linear(4, 4), torch.ones(1, 4), loss=interactive["loss"])
    assert step.loss.__globals__["torch"].backends.cudnn is torch.backends.cudnn
    assert step.loss(step.model, step.inputs)[0] is torch.backends.cudnn.enabled


def lock_in_a_closure():
    lock = threading.Lock()
    return lambda *_: lock and None


def lazy():
    return nn.Sequential(nn.LazyLinear(4))


def holding(value):
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].extra = value
    return model


def compiled_in_place():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].compile()
    return model


def hooked():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lock_in_a_closure())
    return model


@pytest.mark.parametrize(
    ("make", "path", "kind", "reason"),
    [
        (lambda: holding(threading.Lock()), "model.0.extra", "_thread.lock", "cannot pickle"),
        (lambda: holding([{"a": (n for n in "ab")}]), "model.0.extra[0]['a']", "generator", "cannot pickle"),
        (lambda: holding(torch.eye(3).to_sparse()), "model.0.extra", "torch.Tensor", "sparse"),
        (lazy, "model.0.weight", "torch.nn.parameter.UninitializedParameter", "call the model once"),
        (hooked, " -> lock", "_thread.lock", "cannot pickle"),
        (compiled_in_place, "model.0", "torch.nn.modules.linear.Linear", "compiled in place"),
    ],
)
def test_an_object_that_cannot_be_sent_is_named_with_its_path(make, path, kind, reason):
    with pytest.raises(NotSentError) as caught:
        round_trip(make())
    message = str(caught.value)
    assert message.startswith("Cannot send model")
    assert f"{path} (type {kind}) to the ghost's process: " in message
    assert reason in message


def test_invalid_arguments_are_refused():
    with pytest.raises(UsageError, match="not int"):
        collect_training_step(3, None, None, None, 3)
    with pytest.raises(UsageError, match="optimizer='adam'"):
        collect_training_step(nn.Linear(2, 2), None, None, "adam", 3)
    with pytest.raises(UsageError, match=r"loss=MSELoss\(\)"):
        collect_training_step(nn.Linear(2, 2), None, nn.MSELoss, None, 3)
    with pytest.raises(UsageError, match="target"):
        collect_training_step(nn.Linear(2, 2), torch.ones(2), nn.MSELoss(), None, 3)


def test_an_optimizer_that_needs_a_closure_is_refused():
    model = nn.Linear(2, 2)
    for optimizer in (torch.optim.LBFGS(model.parameters()), torch.optim.LBFGS):
        with pytest.raises(UsageError, match=r"LBFGS\.step\(\) needs a closure"):
            collect_training_step(model, None, None, optimizer, 3)


def test_only_an_optimizer_that_shares_no_parameter_with_the_model_is_refused():
    model, before = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    with pytest.raises(UsageError, match="Adam holds none of the parameters of this Sequential"):
        collect_training_step(model, None, None, torch.optim.Adam(before.parameters()), 3)
    for parameters in (model[1].parameters(), [model[0].bias, before.weight]):
        collect_training_step(model, None, None, torch.optim.Adam(parameters), 3)
    model.requires_grad_(False)  # the trained parameters are elsewhere: a prompt in the loss
    collect_training_step(model, None, None, torch.optim.Adam(before.parameters()), 3)


def test_switches_round_trip():
    before = torch_backend_flags()
    changed = {**before, "matmul precision": "high", "default dtype": torch.float64, "cuDNN benchmark": True}
    try:
        set_torch_backend_flags(changed)
        assert torch_backend_flags() == changed
        assert torch.empty(0).dtype is torch.float64
        assert torch.backends.cudnn.benchmark
    finally:
        set_torch_backend_flags(before)
