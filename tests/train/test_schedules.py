"""A scheduler steps after each update, after each epoch, or by a validated metric, as the engine is set."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import memfit
from memfit.errors import UsageError


def loader(batches=3):
    return [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(batches)]


def square(model, data):
    return model(data).square().mean()


def scheduled(kind, interval):
    """Return an engine whose scheduler halves the rate every second interval."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    options = {"loss": square, "scheduler": scheduler, "scheduler_interval": interval, "callbacks": kind}
    return memfit.Engine(model, optimizer=optimizer, **options)


class Rates(memfit.Callback):
    """Keeps the learning rate of each update, and the state after each epoch."""

    def __init__(self):
        self.seen, self.states = [], []

    def on_optimizer_step_begin(self, engine):
        self.seen.append(engine.optimizer.param_groups[0]["lr"])

    def on_epoch_end(self, engine):
        self.states.append(copy.deepcopy(engine.state_dict()))


def test_schedulers_count_updates_or_epochs_as_told():
    batches = list(loader())
    by_update, by_epoch = Rates(), Rates()
    scheduled([by_update], "update").fit(batches, 4)
    scheduled([by_epoch], "epoch").fit(batches, 4)
    each = len(batches)
    assert by_update.seen == [0.5 ** (update // 2) for update in range(4 * each)]
    assert by_epoch.seen == [0.5 ** (epoch // 2) for epoch in range(4) for _ in range(each)]
    for epoch, state in enumerate(by_epoch.states, 1):
        again = Rates()
        resumed = scheduled([again], "epoch")
        resumed.load_state_dict(state)
        resumed.fit(batches, 4)
        assert again.seen == by_epoch.seen[epoch * each :]


def test_a_validation_that_is_interrupted_loses_no_step_of_the_scheduler():
    plain, rates = Rates(), Rates()
    scheduled([plain], "epoch").fit(list(loader()), 4)
    run, calls = scheduled([rates], "epoch"), []

    def interrupted(model, batch):
        calls.append(model.training)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return square(model, batch)

    data = list(loader())
    with pytest.raises(KeyboardInterrupt):
        run.fit(data, 4, validate=data, metrics={"loss": interrupted})
    assert (run.epoch, run.model.training, calls) == (1, True, [False, False])
    run.fit(data, 4, validate=data, metrics={"loss": interrupted})
    assert rates.seen == plain.seen


def test_epochs_of_another_loop_step_the_scheduler_where_it_says_so():
    run = scheduled([], "epoch")
    for _ in range(2):
        for batch in run.through(loader()):
            run.step(batch)
        run.end_epoch()
    assert run.scheduler.get_last_lr() == [0.5]


def test_a_scheduler_without_its_interval_is_refused():
    for interval, words in (
        (None, "StepLR\\(optimizer, 30\\) usually does"),
        ("batch", "must be one of update, epoch, not 'batch'"),
    ):
        with pytest.raises(UsageError, match=words):
            scheduled([], interval)
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError, match="ReduceLROnPlateau needs a metric after each epoch"):
        memfit.Engine(
            model,
            optimizer=torch.optim.SGD(model.parameters()),
            scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau,
            scheduler_interval="epoch",
        )


def watching(callbacks, metric="worst", **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=0)
    options = {"scheduler": scheduler, "scheduler_metric": metric} | options
    return memfit.Engine(model, optimizer=optimizer, loss=square, callbacks=callbacks, **options)


def worst(model, batch):
    return model(batch).square().max()


def test_a_scheduler_watches_a_validated_metric_as_a_plain_loop_has_it():
    rates, checked = Rates(), {"worst": worst, "loss": square}
    run = watching([rates])
    run.fit(loader(), 5, validate=loader(2), metrics=checked)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler, seen = ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=0), []
    for _ in range(5):
        for batch in loader():
            seen.append(optimizer.param_groups[0]["lr"])
            square(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            scheduler.step(sum(float(worst(model, batch)) for batch in loader(2)) / 2)
    assert rates.seen == seen
    assert len(set(seen)) > 2
    assert torch.equal(run.model.weight, model.weight)
    for epoch, state in enumerate(rates.states, 1):
        again = Rates()
        resumed = watching([again])
        resumed.load_state_dict(state)
        resumed.fit(loader(), 5, validate=loader(2), metrics=checked)
        assert again.seen == seen[3 * epoch :]


def test_a_loop_of_its_own_validates_before_the_scheduler_steps():
    run = watching([], "loss")
    with pytest.raises(
        UsageError, match=r"watches the metric 'loss', .* Nothing is validated\. .*call engine\.validate"
    ):
        run.end_epoch()
    for _ in range(3):
        run.validate(loader(2))
        run.end_epoch()
    assert run.scheduler.get_last_lr() == [0.25]


def test_a_metric_that_is_not_computed_is_refused_before_training():
    run = watching([], "accuracy")
    with pytest.raises(UsageError, match=r"'accuracy', which is not computed\. Nothing is validated"):
        run.fit(loader())
    with pytest.raises(UsageError, match=r"The metrics are loss\. Pass engine\.fit"):
        run.fit(loader(), validate=loader())
    assert run.optimizer_step == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"scheduler": lambda optimizer: StepLR(optimizer, 3)},
            "StepLR watches no metric: .* only ReduceLROn",
        ),
        (
            {"scheduler_interval": "update"},
            "scheduler_interval='update' contradicts scheduler_metric='worst'",
        ),
        ({"scheduler": None}, "A scheduler needs an interval, and an interval a scheduler"),
        ({"scheduler": lambda _: [1, 2]}, r"scheduler=\[1, 2\] is not a scheduler: .* SequentialLR"),
    ],
)
def test_schedulers_that_contradict_their_settings_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        watching([], **options)


def test_a_run_whose_scheduler_steps_at_other_times_does_not_resume():
    saved = scheduled([], "epoch").state_dict()
    with pytest.raises(
        UsageError, match=r"scheduler steps after each epoch, but this engine's steps after each upd"
    ):
        scheduled([], "update").load_state_dict(saved)
    del saved["schedule"]  # as earlier versions saved it
    scheduled([], "update").load_state_dict(saved)


# ---- Several optimizers ----------------------------------------------------------------------------------


def generator():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def discriminator():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def engines():
    """Return the engines of a GAN: each with its own model, loss and schedule."""
    making, judging = generator(), discriminator()
    fool = lambda model, noise: nn.functional.softplus(-judging(model(noise))).mean()  # noqa: E731
    tell = lambda model, pair: (  # noqa: E731
        nn.functional.softplus(-model(pair[0])) + nn.functional.softplus(model(pair[1]))
    ).mean()
    first, second = adam(making), adam(judging)
    return (
        memfit.Engine(
            making, optimizer=first, loss=fool, scheduler=StepLR(first, 4), scheduler_interval="update"
        ),
        memfit.Engine(
            judging, optimizer=second, loss=tell, scheduler=StepLR(second, 1), scheduler_interval="epoch"
        ),
    )


def gan_epoch(make, judge):
    for real in judge.through(loader(5)):
        with torch.no_grad():
            fake = make.model(torch.randn(4, 3))
        judge.step((real, fake))
        make.step(torch.randn(4, 3))
    judge.end_epoch()


def test_two_engines_train_a_gan_as_a_plain_loop_does_and_resume():
    make, judge = engines()
    torch.manual_seed(3)
    gan_epoch(make, judge)
    saved = copy.deepcopy([make.state_dict(), judge.state_dict()])
    gan_epoch(make, judge)

    making, judging = generator(), discriminator()
    first, second = adam(making), adam(judging)
    by_update, by_epoch = StepLR(first, 4), StepLR(second, 1)
    torch.manual_seed(3)
    for _ in range(2):
        for real in loader(5):
            with torch.no_grad():
                fake = making(torch.randn(4, 3))
            second.zero_grad()
            (nn.functional.softplus(-judging(real)) + nn.functional.softplus(judging(fake))).mean().backward()
            second.step()
            noise = torch.randn(4, 3)
            first.zero_grad()
            nn.functional.softplus(-judging(making(noise))).mean().backward()
            first.step()
            by_update.step()
        by_epoch.step()

    again, other = engines()
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    gan_epoch(again, other)
    for ours in ((make, judge), (again, other)):
        for engine, plain in zip(ours, (making, judging), strict=True):
            left, right = engine.model.state_dict(), plain.state_dict()
            assert all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.parametrize("several", [list, lambda pair: dict(enumerate(pair))])
def test_several_optimizers_in_one_engine_are_refused_by_name(several):
    both = nn.ModuleList([generator(), discriminator()])
    optimizers = several([adam(both[0]), adam(both[1])])
    with pytest.raises(
        UsageError, match=r"An engine has one optimizer, but 2 were given\. .*create an engine for each"
    ):
        memfit.Engine(both, optimizer=optimizers, loss=square)
