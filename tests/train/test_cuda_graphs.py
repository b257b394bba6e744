"""A step as two CUDA graphs, emulated by functions on the CPU, and captured on the ghost."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import memfit
from memfit.errors import UsageError
from memfit.train.cuda_graphs import WARM_UP, StepCudaGraphs
from memfit.train.step_snapshots import OptimizerBackup

captured = []


def emulated_capture(optimizer):
    """Return a stand-in for capturing graphs on a machine without a GPU."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def capture(function):
        """Record a function without keeping its effects, as a capture does; replays update its result."""
        before = OptimizerBackup(optimizer)
        gradients = [(parameter.grad, parameter.grad.clone()) for parameter in parameters]
        result = function()
        before.restore()
        for gradient, value in gradients:
            gradient.copy_(value)
        captured.append(function)
        constants = [dict(group) for group in optimizer.param_groups]

        def replay():
            now = [dict(group) for group in optimizer.param_groups]
            for group, constant in zip(optimizer.param_groups, constants, strict=True):
                group.update(constant)
            updated = function()
            for group, value in zip(optimizer.param_groups, now, strict=True):
                group.update(value)
            if updated is not None:
                result.copy_(updated)

        return replay, result

    return capture


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def loss(model, data):
    return F.cross_entropy(model(data[0]), data[1])


def batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(4, (size,), generator=generator)


def engine(steps=2, *, cuda_graphs, schedule=False, **options):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if schedule else None
    return memfit.Engine(
        model,
        memfit.Accumulation(parts_per_batch=steps),
        optimizer=optimizer,
        loss=loss,
        scheduler=scheduler,
        scheduler_interval="update" if schedule else None,
        cuda_graphs=cuda_graphs,
        **options,
    )


@pytest.fixture
def emulated_graphs(monkeypatch):
    """Have engines emulate their graphs on the CPU."""
    captured.clear()

    monkeypatch.setattr(
        "memfit.train.engine_setup.prepare_step_cuda_graphs",
        lambda optimizer: StepCudaGraphs(optimizer, emulated_capture(optimizer), nullcontext),
    )


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("norm", [None, 0.1])
def test_a_step_by_graphs_equals_a_plain_step(steps, norm, schedule, emulated_graphs):
    sizes = [8] * 6 + [5] + [8] * 3  # one batch is shorter and runs without graphs
    plain, ours = (
        engine(steps, cuda_graphs=on, schedule=schedule, max_grad_norm=norm) for on in (False, True)
    )
    for seed, size in enumerate(sizes):
        left, right = plain.step(batch(size, seed)), ours.step(batch(size, seed))
        assert (left.loss, left.grad_norm, left.updated) == (right.loss, right.grad_norm, right.updated)
        for pair in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
            assert torch.equal(*pair)
    assert len(captured) == 2


def test_graphs_are_recaptured_after_loading_a_state(emulated_graphs):
    plain, ours = engine(cuda_graphs=False), engine(cuda_graphs=True)
    for seed in range(6):
        plain.step(batch(8, seed))
        ours.step(batch(8, seed))
    other = engine(cuda_graphs=True)
    for seed in range(5):
        other.step(batch(8, 50 + seed))
    other.load_state_dict(ours.state_dict())
    for seed in range(6, 12):
        plain.step(batch(8, seed))
        other.step(batch(8, seed))
    for pair in zip(plain.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(*pair)
    assert len(captured) == 2 + 2 + 2  # loading replaced tensors that the earlier graphs use


def test_settings_that_cannot_be_captured_are_refused(emulated_graphs):
    def summed(model, data):
        return F.cross_entropy(model(data[0]), data[1], reduction="sum"), len(data[1])

    model = net()
    run = memfit.Engine(model, optimizer=torch.optim.SGD(model.parameters()), loss=summed, cuda_graphs=True)
    for seed in range(WARM_UP):
        run.step(batch(8, seed))
    with pytest.raises(UsageError, match="cuda_graphs needs a loss function that returns the mean"):
        run.step(batch(8, WARM_UP))
    for precision in (
        memfit.Precision("fp16"),
        memfit.Precision("bf16", autocast=False, master_weights=True),
    ):
        model = net()
        with pytest.raises(UsageError, match="cuda_graphs cannot be combined with"):
            memfit.Engine(model, precision, optimizer=torch.optim.SGD(model.parameters()), cuda_graphs=True)


def test_a_hand_written_loop_is_refused_with_cuda_graphs(emulated_graphs):
    run = engine(cuda_graphs=True)
    with pytest.raises(UsageError, match=r"Use engine\.fit or engine\.step, or leave out cuda_graphs"):
        next(run.windows([batch(4, 0)]))
    with pytest.raises(UsageError, match=r"Use engine\.fit or engine\.step, or leave out cuda_graphs"):
        run.backward(loss(run.model, batch(4, 0)))
    assert run.step(batch(8, 0)).updated


def test_without_a_gpu_graphs_are_refused():
    with pytest.raises(UsageError, match="cuda_graphs needs parameters on a GPU"):
        engine(cuda_graphs=True)


@pytest.mark.slow
def test_on_the_ghost_two_graphs_are_captured_and_replayed(dry_run):
    done = dry_run(
        """
        import torch, memfit
        from torch import nn

        counts = {"captured": 0, "replayed": 0}
        real = torch.cuda.CUDAGraph.replay, torch.cuda.CUDAGraph.capture_begin
        def replay(self):
            counts["replayed"] += 1
            real[0](self)
        def begin(self, *given, **named):
            counts["captured"] += 1
            real[1](self, *given, **named)
        torch.cuda.CUDAGraph.replay, torch.cuda.CUDAGraph.capture_begin = replay, begin

        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine = memfit.Engine(
            model,
            [memfit.Accumulation(parts_per_batch=4), memfit.Precision("bf16")],
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100),
            scheduler_interval="update",
            loss=lambda model, data: model(data).float().square().mean(),
            max_grad_norm=1.0,
            cuda_graphs=True,
        )
        for step in range(8):
            engine.step(torch.randn(32, 64, device="cuda"))
        print("counts", counts, engine.optimizer_step, engine.micro_step)
        """,
        options=["--steps", "20"],
    )
    assert "counts {'captured': 2, 'replayed': 25} 8 32" in done.out, done.out + done.err
