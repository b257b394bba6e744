"""Edge cases of the engine: foreign gradients, failed steps, unusual losses, loaders and batches."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import memfit
from memfit.errors import UsageError

SUMS = (memfit.Precision("bf16", autocast=False), memfit.Accumulation(parts_per_batch=2))
MASTERS = (memfit.Precision("bf16", autocast=False, master_weights=True),)
IN_BACKWARD = (memfit.OptimizerState(step_in_backward=True),)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batch(size=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(4, (size,), generator=generator)


def loss(model, data):
    dtype = next(model.parameters()).dtype
    return F.cross_entropy(model(data[0].to(dtype)).float(), data[1])


def engine(model, *plan, lr=0.1, **options):
    return memfit.Engine(
        model, plan, **{"optimizer": torch.optim.SGD(model.parameters(), lr=lr), "loss": loss} | options
    )


def same(left, right):
    return all(torch.equal(*pair) for pair in zip(left.parameters(), right.parameters(), strict=True))


@pytest.mark.parametrize(
    "plan", [(), SUMS, MASTERS, IN_BACKWARD], ids=["plain", "sums", "masters", "in backward"]
)
def test_gradients_left_by_other_code_do_not_count_in_the_window(plan):
    """Such as those that a generator's backward leaves in the discriminator."""
    ours, plain = net(), net()
    run, reference = engine(ours, *plan), engine(plain, *plan)
    for seed in range(3):
        loss(ours, batch(seed=10 + seed)).backward()
        assert seed or plan == IN_BACKWARD or same(ours, net().to(ours[0].weight.dtype))
        run.step(batch(seed=seed))
        reference.step(batch(seed=seed))
        assert same(ours, plain)


@pytest.mark.parametrize("plan", [SUMS, MASTERS, IN_BACKWARD], ids=["sums", "masters", "in backward"])
@pytest.mark.parametrize("engine_deleted", [False, True])
def test_a_reverted_model_trains_like_any_other(plan, engine_deleted):
    model = net()
    run = engine(model, *plan)
    run.step(batch())
    freed = weakref.ref(run._ledger.update)
    if engine_deleted:
        del run
        gc.collect()
        assert freed() is None, "the model's hooks keep an engine's gradients and copies alive"
    memfit.revert(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss(model, batch()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_an_engine_that_fails_to_start_leaves_the_model_unchanged():
    model = net()
    for plan, options, words in (
        ((MASTERS[0], memfit.OptimizerState(bits=8)), {}, "8-bit"),
        (
            (memfit.Precision("bf16", autocast=False), IN_BACKWARD[0]),
            {"max_grad_norm": 1.0},
            "cannot be combined",
        ),
        ((memfit.Precision("bf16"),), {"optimizer": torch.optim.LBFGS(model.parameters())}, "LBFGS"),
        ((), {"max_grad_norm": -1.0}, "max_grad_norm must be None or a number above 0, not -1.0"),
        ((), {"protect": "sometimes"}, "protect must be one of auto"),
        ((), {"callbacks": memfit.ProgressBar()}, "a list of memfit.Callback"),
    ):
        with pytest.raises(UsageError, match=words):
            engine(model, *plan, **options)
        assert model[0].weight.dtype == torch.float32
        assert "forward" not in vars(model)
    engine(model).step(batch())
    engine(model).step(batch())  # like a notebook cell that runs twice
    with pytest.raises(UsageError, match="no parameters"):
        memfit.Engine(nn.Tanh(), optimizer=torch.optim.SGD)
    with pytest.raises(UsageError, match="takes a model or a"):
        memfit.Engine("model")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_losses_of_low_precision_are_summed_in_float32(dtype):
    model = net()
    run = engine(
        model,
        memfit.Precision(dtype, autocast=False, master_weights=True),
        memfit.Accumulation(parts_per_batch=1024),
        lr=0.0,
        loss=lambda model, data: loss(model, data).to(model[0].weight.dtype),
    )
    whole = loss(model, batch(2048)).item()
    assert run.step(batch(2048)).loss == pytest.approx(whole, rel=5e-3)


@pytest.mark.parametrize("plan", [SUMS, MASTERS], ids=["sums", "masters"])
def test_a_parameter_unfrozen_later_is_refused_in_low_precision(plan):
    model = net()
    model[0].weight.requires_grad_(False)
    run = engine(model, *plan)
    run.step(batch())
    model[0].weight.requires_grad_(True)
    with pytest.raises(UsageError, match=r"shape \(8, 6\) has a gradient, but was frozen"):
        run.step(batch())


def test_a_micro_batch_of_weight_0_adds_nothing():
    x, y = batch()
    y[:4] = -100

    def tokens(model, data):
        return F.cross_entropy(model(data[0]), data[1], reduction="sum"), (data[1] != -100).sum()

    ours, plain = net(), net()
    result = engine(ours, memfit.Accumulation(parts_per_batch=2), loss=tokens).step((x, y))
    reference = engine(plain, loss=tokens).step((x[4:], y[4:]))
    assert same(ours, plain)
    assert result.loss == reference.loss
    y[:] = -100
    with pytest.raises(UsageError, match="no mean loss, because all of its micro-batches have weight 0"):
        engine(ours, loss=tokens).step((x, y))


def test_a_hand_written_loop_continues_after_a_failed_backward():
    ours, plain = net(), net()
    run, reference = (
        engine(ours, memfit.Accumulation(batches_per_update=2)),
        engine(plain, memfit.Accumulation(batches_per_update=2)),
    )
    run.backward(loss(ours, batch()))
    with pytest.raises(RuntimeError, match="does not require grad"):
        run.backward(torch.ones(()))
    with pytest.raises(UsageError, match=r"Drop the window with engine\.drop\(\)"):
        run.backward(loss(ours, batch()))
    run.drop()
    for seed in (2, 3):
        run.backward(loss(ours, batch(seed=seed)))
        reference.backward(loss(plain, batch(seed=seed)))
    assert (run.optimizer_step, reference.optimizer_step) == (1, 1)
    assert same(ours, plain)


def test_a_scheduler_that_reads_the_loss_gets_that_of_the_window():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    run = memfit.Engine(
        model, optimizer=optimizer, loss=loss, scheduler=scheduler, scheduler_interval="update"
    )
    for _ in range(3):
        run.step(batch())
    assert scheduler.num_bad_epochs == 2
    assert scheduler.best == pytest.approx(loss(model, batch()).item())


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(UsageError, match="Check that the loss depends on the model whose"):
        engine(net(), optimizer=torch.optim.SGD(net().parameters())).step(batch())


def test_a_batch_that_was_changed_is_not_retried():
    def short(model, data):
        data[0].mul_(2)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(UsageError, match="changed the batch in place"):
        engine(net(), loss=short).step(batch())


@pytest.mark.parametrize("returned", [{"loss": 1}, 1.0, (1, 2, 3)])
def test_a_loss_of_a_wrong_type_is_refused(returned):
    with pytest.raises(UsageError, match=f"returned a {type(returned).__name__}. It must return the mean"):
        engine(net(), loss=lambda model, data: returned).step(batch())


def test_an_engine_is_freed_with_its_last_reference():
    gc.collect()
    gc.disable()
    try:
        model = net()
        run = engine(model, memfit.Accumulation(parts_per_batch=2), memfit.Precision("bf16"))
        run.step(batch())
        references = weakref.ref(run), weakref.ref(model)
        del run, model
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_is_recognised_in_every_wording(error):
    left = [error]

    def short(model, data):
        if left:
            raise left.pop()
        return loss(model, data)

    assert engine(net(), loss=short).step(batch()).retried == 1


def test_fit_continues_where_it_was_stopped():
    class Stops(memfit.Callback):
        def on_window_end(self, engine, result):
            if engine.optimizer_step == 2:
                engine.stop()

    data = torch.utils.data.TensorDataset(*batch(24))
    ours, plain = net(), net()
    run, reference = engine(ours, callbacks=[Stops()]), engine(plain)
    for trained, times in ((run, 2), (reference, 1)):
        torch.manual_seed(5)
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        for _ in range(times):
            trained.fit(loader, epochs=2)
    assert run.optimizer_step == reference.optimizer_step == 12
    assert same(ours, plain)


def test_fit_with_other_data_after_a_stop_begins_with_their_first_batch():
    class Stops(memfit.Callback):
        def on_window_end(self, engine, result):
            if engine.optimizer_step == 2:
                engine.stop()

    run = engine(net(), callbacks=[Stops()])
    run.fit([batch(4)] * 3)
    seen = []
    run.fit((seen.append(number) or batch(4) for number in range(2)), epochs=1)
    assert seen == [0, 1]
    assert run.optimizer_step == 4


@pytest.mark.parametrize("done", [1, 2, 3, 4])
def test_a_window_with_a_loss_scale_resumes_after_any_micro_batch(done):
    plan = memfit.Precision("fp16"), memfit.Accumulation(batches_per_update=4)
    saved = {}

    def train(run, at=None):
        for window in run.windows([batch(seed=seed) for seed in range(8)]):
            for data in window:
                with run.autocast():
                    mean = loss(run.model, data)
                run.backward(mean)
                if run.micro_step == at:
                    saved.update(copy.deepcopy(run.state_dict()))
        return run

    whole = train(engine(net(), *plan), at=done)
    resumed = engine(net(1), *plan)
    resumed.load_state_dict(saved)
    assert train(resumed).optimizer_step == 2
    assert same(resumed.model, whole.model)


def test_a_loader_whose_batch_size_contradicts_the_settings_is_refused():
    def data(size):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(64)), batch_size=size)

    divided = memfit.Accumulation(micro_batch_size=8, global_batch_size=32)
    with pytest.raises(UsageError, match="The loader's batch_size is 8, but global_batch_size=32"):
        engine(net(), divided).fit(data(8))
    assert engine(net(), divided).fit(data(32)).micro_step == 8
    gathered = memfit.Accumulation(batches_per_update=4, micro_batch_size=8)
    for entry in (lambda run, loader: next(run.windows(loader)), memfit.Engine.fit):
        with pytest.raises(UsageError, match="The loader's batch_size is 32, but micro_batch_size=8"):
            entry(engine(net(), gathered), data(32))
    assert engine(net(), gathered).fit(data(8)).optimizer_step == 2


def test_data_without_a_length_are_accepted():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(*batch(12), strict=True))

    assert engine(net()).fit(torch.utils.data.DataLoader(Stream(), batch_size=4)).optimizer_step == 3


class Odd:
    """A batch of an unknown type."""

    def __init__(self, x, y):
        self.x, self.y = x, y


def test_a_batch_of_any_type_is_trained_undivided():
    def of_odd(model, data):
        return loss(model, (data.x, data.y))

    ours, plain = net(), net()
    engine(ours, loss=of_odd).step(Odd(*batch()))
    engine(plain).step(batch())
    assert same(ours, plain)
    with pytest.raises(UsageError, match="Cannot determine the number of samples"):
        engine(net(), memfit.Accumulation(parts_per_batch=2), loss=of_odd).step(Odd(*batch()))


class Counted(nn.Linear):
    """A layer with a moving average that is not part of its state_dict."""

    def __init__(self):
        super().__init__(6, 4)
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x):
        out = super().forward(x) - self.mean
        self.mean.lerp_(out.detach().mean(0), 0.1)
        return out


def test_non_persistent_buffers_are_resumed():
    first, resumed = engine(Counted()), engine(Counted())
    for seed in range(3):
        first.step(batch(seed=seed))
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    for run in (first, resumed):
        run.step(batch(seed=9))
    assert same(first.model, resumed.model)
    assert torch.equal(first.model.mean, resumed.model.mean)
