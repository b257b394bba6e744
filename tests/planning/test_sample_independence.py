"""Whether samples depend on each other: what memfit says, beside gradients of micro-batches on the CPU."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.planning.sample_independence import why_loss_is_a_sum, why_samples_depend
from memfit.recording.step_operations import StepOperationRecorder

SAMPLES, WIDTH = 8, 6


def network(*, norm=None):
    return nn.Sequential(
        nn.Linear(WIDTH, 10), norm or nn.Identity(), nn.GELU(), nn.Linear(10, WIDTH)
    ).double()


class Averaged(nn.Module):
    """A model that subtracts the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        y = self.inner(x)
        return y - y.mean()


class Remembering(nn.Module):
    """A model whose code book follows what it sees."""

    def __init__(self):
        super().__init__()
        self.inner = network()
        self.register_buffer("book", torch.zeros(WIDTH, WIDTH, dtype=torch.double))

    def forward(self, x):
        y = self.inner(x)
        with torch.no_grad():
            self.book.addmm_(y.T, y)
        return y + self.book[0]


def squares(y, _):
    return y.square().mean()


def classes(y, labels):
    return functional.cross_entropy(y, labels)


def smoothed(y, labels):
    return functional.cross_entropy(y, labels, label_smoothing=0.1)


def two_terms(y, labels):
    return functional.cross_entropy(y, labels) / 3 + 0.1 * y.abs().mean() - 2


def checked(y, labels):
    """Return a loss beside figures that nothing is learned from."""
    loss = functional.cross_entropy(y, labels)
    accuracy = (y.argmax(1) == labels).double().mean().sqrt()
    return loss if loss.isfinite() and accuracy >= 0 else loss * 0


def contrastive(y, _):
    return functional.cross_entropy(y @ y.T, torch.arange(len(y)))


def ratio(y, _):
    return y.square().mean() / y.abs().mean()


def root(y, _):
    return y.square().mean().sqrt()


def covariance(y, _):
    return (y.T @ y / len(y)).square().sum()


def spread(y, _):
    return y.std()


def highest(y, _):
    return y.max()


def normalized(y, labels):
    return functional.cross_entropy(y / y.norm(dim=0), labels)


def ordered(y, _):
    return (y.sort(0).values - torch.linspace(-1, 1, len(y))[:, None]).square().mean()


def hardest(y, _):
    return y.square().mean(1).topk(len(y) // 4).values.mean()


INDEPENDENT = {
    "squares": (network, squares),
    "cross-entropy": (network, classes),
    "label smoothing": (network, smoothed),
    "two terms": (network, two_terms),
    "figures beside the loss": (network, checked),
    "layer normalization": (lambda: network(norm=nn.LayerNorm(10)), classes),
    "frozen statistics": (lambda: network(norm=nn.BatchNorm1d(10).eval()), classes),
}
DEPENDENT = {
    "batch normalization": (lambda: network(norm=nn.BatchNorm1d(10)), classes),
    "mean of the batch": (Averaged, squares),
    "code book": (Remembering, classes),
    "contrastive": (network, contrastive),
    "ratio": (network, ratio),
    "root": (network, root),
    "covariance": (network, covariance),
    "standard deviation": (network, spread),
    "maximum": (network, highest),
    "norm over the batch": (network, normalized),
    "sorted batch": (network, ordered),
    "hardest samples": (network, hardest),
}


def recorded(make, loss, samples):
    """Return a step with so many samples."""
    torch.manual_seed(0)
    model, x, labels = make(), torch.randn(SAMPLES, WIDTH).double(), torch.randint(WIDTH, (SAMPLES,))
    recorder = StepOperationRecorder(model)
    recorder.start()
    loss(model(x[:samples]), labels[:samples]).backward()
    return recorder.stop()


def gradients(make, loss, parts):
    """Return the gradients of a batch in equal parts."""
    torch.manual_seed(0)
    model, x, labels = make(), torch.randn(SAMPLES, WIDTH).double(), torch.randint(WIDTH, (SAMPLES,))
    model = copy.deepcopy(model)
    for part, of_part in zip(x.chunk(parts), labels.chunk(parts), strict=True):
        (loss(model(part), of_part) / parts).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()])


@pytest.mark.parametrize("name", INDEPENDENT)
def test_where_micro_batches_have_the_same_gradients_samples_are_independent(name):
    make, loss = INDEPENDENT[name]
    assert torch.allclose(gradients(make, loss, 1), gradients(make, loss, 4), rtol=1e-12, atol=1e-14)
    assert why_samples_depend(recorded(make, loss, SAMPLES), recorded(make, loss, SAMPLES // 2)) == ""


@pytest.mark.parametrize("name", DEPENDENT)
def test_where_micro_batches_have_other_gradients_samples_depend_on_each_other(name):
    make, loss = DEPENDENT[name]
    assert not torch.allclose(gradients(make, loss, 1), gradients(make, loss, 4), rtol=1e-3)
    assert why_samples_depend(recorded(make, loss, SAMPLES), recorded(make, loss, SAMPLES // 2))


def test_the_reason_names_the_operation_and_the_module():
    make, loss = DEPENDENT["batch normalization"]
    why = why_samples_depend(recorded(make, loss, SAMPLES), recorded(make, loss, SAMPLES // 2))
    assert why.startswith("in aten.native_batch_norm.default of 1 (BatchNorm1d), samples are combined other")
    make, loss = DEPENDENT["root"]
    why = why_samples_depend(recorded(make, loss, SAMPLES), recorded(make, loss, SAMPLES // 2))
    assert why.startswith("in aten.sqrt.default of the loss, a sum over the samples is not only scaled")


def test_a_mean_whose_storage_has_its_terms_is_one_number():
    """On a GPU, ``mse_loss`` writes its terms into the storage of the mean."""

    def step(samples):
        found = recorded(network, lambda y, _: functional.mse_loss(y, torch.zeros_like(y)) / 2, samples)
        (mean,) = (each for each in found.forward if each.name.startswith("aten.mse_loss"))
        sizes = [*found.storages]
        sizes[mean.creates[0]] = samples * WIDTH * 8
        return replace(found, storages=tuple(sizes))

    assert why_samples_depend(step(SAMPLES), step(SAMPLES // 2)) == ""


class Counting(nn.Module):
    """A model that returns its loss: a sum that it divides by a number of tokens that it is passed."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x, count):
        return self.inner(x).square().sum() / count


@pytest.mark.parametrize("of_samples", [False, True])
def test_a_count_that_the_model_is_passed_is_no_sample(of_samples):
    """transformers' Trainer passes the number of tokens in an update; other numbers may depend on samples."""

    def step(samples):
        model, x = Counting(), torch.randn(SAMPLES, WIDTH).double()[:samples]
        divisor = x.mean() if of_samples else torch.tensor(SAMPLES * WIDTH)
        recorder = StepOperationRecorder(model)
        recorder.start()
        model(x, divisor).backward()
        return recorder.stop()

    why = why_samples_depend(step(SAMPLES), step(SAMPLES // 2))
    assert ("samples depend on a sum over all of them" in why) == of_samples


def test_a_loop_over_the_samples_is_another_step_with_half_of_them():
    def loop(y, _):
        return sum(each.square().mean() for each in y) / len(y)

    whole, half = recorded(network, loop, SAMPLES), recorded(network, loop, SAMPLES // 2)
    assert why_samples_depend(whole, half) == "with half the samples, the step runs other operations"


def summed(y, labels):
    return functional.cross_entropy(y, labels, reduction="sum")


@pytest.mark.parametrize(
    ("loss", "is_sum"),
    [
        (classes, False),
        (squares, False),
        (two_terms, False),
        (summed, True),
        (lambda y, _: functional.mse_loss(y, torch.zeros_like(y), reduction="sum"), True),
        (lambda y, _: y.square().sum(), True),
        (lambda y, labels: (y.detach().square().sum() * 0).add(classes(y, labels)), False),
        (lambda y, _: y.square().mean(1).sum(), True),
        (lambda y, labels: 0.5 * summed(y, labels) / WIDTH, True),
        (lambda y, labels: summed(y, labels) * torch.tensor(3.0), True),  # as by a loss scaler
        (lambda y, labels: classes(y, labels) + 1e-3 * y.square().sum(), True),
        (lambda y, labels: summed(y, labels) / len(y), False),
        (lambda y, labels: summed(y, labels) * (1 / len(y)), False),
        (lambda y, _: torch.stack([y.sum(), y.square().sum()]).sum() / y.numel(), False),
        (lambda y, labels: summed(y, labels) / (labels >= 0).sum(), False),
        (lambda y, _: y.square().sum(1).mean(), False),
        (lambda y, _: functional.kl_div(y, y.detach().exp(), reduction="batchmean"), False),
    ],
)
def test_a_loss_that_is_a_sum_over_samples_is_named(loss, is_sum):
    """Parts of a sum, each divided by their number, are not the sum."""
    found = why_loss_is_a_sum(recorded(network, loss, SAMPLES), recorded(network, loss, SAMPLES // 2))
    assert ("the loss is a sum over samples" in found) is is_sum
    same = torch.allclose(gradients(network, loss, 1), gradients(network, loss, 4), rtol=1e-6)
    assert same is not is_sum


def test_what_a_step_makes_of_its_samples_must_not_decide_the_next():
    """State is found wherever it is kept: here, a mean of the samples that the script holds."""
    model, x = network(), torch.randn(SAMPLES, WIDTH).double()

    def steps(samples, *, decides):
        mean, logged, left = torch.zeros(WIDTH).double(), torch.zeros(()).double(), None
        for _ in range(2):
            recorder = StepOperationRecorder(model, left=left)
            recorder.start()
            y = model(x[:samples])
            logged = logged + y.detach().square().mean()
            loss = (y - mean * decides if decides else y).square().mean()
            mean = 0.9 * mean + 0.1 * y.detach().mean(0)
            loss.backward()
            step, left = recorder.stop(), recorder.left
        return step

    assert why_samples_depend(*(steps(each, decides=0) for each in (SAMPLES, SAMPLES // 2))) == ""
    carried = why_samples_depend(*(steps(each, decides=1) for each in (SAMPLES, SAMPLES // 2)))
    assert "a step goes on from what the one before made of its samples" in carried
    whole, half = (steps(each, decides=1) for each in (SAMPLES, SAMPLES // 2))
    assert why_samples_depend(whole, half, in_model=True) == carried  # the loss has it from elsewhere
    recorder = StepOperationRecorder(model)
    recorder.start()
    model(x).mean().backward()
    assert recorder.stop().carried is None
