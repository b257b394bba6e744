"""``fit`` validates after each epoch, and callbacks stop and save by what it finds."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import memfit
from memfit.errors import UsageError


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, 3))


def data(samples, seed=1, size=4):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(samples, 5, generator=generator), torch.randint(3, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), size, shuffle=True)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batch):
    """As a pair: batches may differ in size."""
    right = model(batch[0]).argmax(1) == batch[1]
    return right.sum(), len(right)


def engine(model, *plan, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return memfit.Engine(model, plan, optimizer=optimizer, loss=loss, **options)


class Seen(memfit.Callback):
    def __init__(self):
        self.metrics, self.states, self.order = [], [], []

    def on_validation_end(self, engine, metrics):
        self.metrics.append(dict(metrics))
        self.order.append("validation")

    def on_epoch_end(self, engine):
        self.order.append("epoch")

    def on_window_end(self, engine, result):
        self.states.append(copy.deepcopy(engine.state_dict()))


def test_fit_with_validation_equals_a_plain_loop_bit_for_bit():
    ours, plain, seen = net(), net(), Seen()
    torch.manual_seed(2)
    engine(ours, callbacks=[seen]).fit(
        data(24), 3, validate=data(10, seed=3), metrics={"loss": loss, "accuracy": accuracy}
    )
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    expected = []
    train, held_out = data(24), data(10, seed=3)
    for _ in range(3):
        plain.train()
        for batch in train:
            loss(plain, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        plain.eval()
        with torch.no_grad():
            batches = list(held_out)
            x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
            output = plain(x)
            expected.append(
                (F.cross_entropy(output, y).item(), (output.argmax(1) == y).float().mean().item())
            )
    assert all(map(torch.equal, ours.state_dict().values(), plain.state_dict().values()))
    found = [(each["loss"], each["accuracy"]) for each in seen.metrics]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    assert seen.order == ["validation", "epoch"] * 3


def test_modules_return_to_the_modes_that_they_had():
    model = net()
    model[1].eval()  # frozen statistics
    modes = []

    def watched(model, batch):
        modes.append([part.training for part in model])
        assert not torch.is_grad_enabled()
        return loss(model, batch)

    run = engine(model)
    run.fit(data(8), validate=data(8), metrics={"loss": watched})
    assert modes[0] == [False] * 5
    assert [part.training for part in model] == [True, False, True, True, True]
    assert run.metrics.keys() == {"loss"}


def test_an_error_in_a_metric_leaves_the_modes_as_they_were():
    model = net()

    def fails(model, batch):
        raise ValueError("metric")

    with pytest.raises(ValueError, match="metric"):
        engine(model).validate(data(8), {"fails": fails})
    assert all(part.training for part in model.modules())
    assert torch.is_grad_enabled()


def test_a_run_with_validation_resumes_after_any_update():
    whole, seen = net(), Seen()
    torch.manual_seed(2)
    engine(whole, callbacks=[seen]).fit(data(24), 2, validate=data(8, seed=3))
    for state in seen.states:
        again, metrics = engine(net(9), callbacks=[(later := Seen())]), seen.metrics
        again.load_state_dict(state)
        again.fit(data(24), 2, validate=data(8, seed=3))
        assert all(map(torch.equal, again.model.state_dict().values(), whole.state_dict().values()))
        assert later.metrics == metrics[-len(later.metrics) :]


def test_a_validation_without_batches_is_refused():
    with pytest.raises(UsageError, match="validation loader returned no batches"):
        engine(net()).validate(iter(()))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "The metric 'odd' returned None. It must return a mean"),
        ({"a": 1.0}, "The metric 'odd' returned {'a': 1.0}"),
        (torch.ones(3), "The metric 'odd' returned tensor"),
        ((1.0, 2.0, 3.0), "or a pair: the sum and its divisor"),
        ((1.0, 0), "The metric 'odd' has no mean: the divisors that it returned add up to 0"),
    ],
)
def test_metrics_that_are_no_numbers_are_refused_by_name(value, words):
    with pytest.raises(UsageError, match=words):
        engine(net()).validate(data(8), {"odd": lambda *_: value})


def test_metrics_without_data_to_validate_are_refused():
    run = engine(net())
    with pytest.raises(UsageError, match=r"engine\.fit\(metrics=\.\.\.\) also needs validate="):
        run.fit(data(8), metrics={"loss": loss})
    assert run.optimizer_step == 0
