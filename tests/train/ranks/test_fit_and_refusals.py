"""``fit`` on several ranks, and what an engine refuses there."""

import pytest
import torch

from memfit import LossScale
from memfit.train.loss_scaler import LossScaler
from memfit.train.ranks.rank_agreement import SingleRank
from support import rank_jobs

CASES = "support.fit_rank_cases"


def test_epochs_are_shuffled_anew_and_divided_among_ranks(two_ranks):
    ranks = two_ranks.run("fit", "ddp", module=CASES)
    epochs = []
    for epoch in range(2):
        batches = slice(3 * epoch, 3 * epoch + 3)
        drawn = [[x for batch in rank["order"][batches] for x in batch] for rank in ranks]
        assert not set(drawn[0]) & set(drawn[1])
        epochs.append(drawn)
    assert len(set(epochs[0][0]) | set(epochs[0][1])) == 22
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_metrics_and_callbacks_see_the_samples_of_all_ranks(two_ranks, mode):
    ranks = two_ranks.run("fit", mode, module=CASES)
    (first, second) = ranks
    assert first["metrics"] == second["metrics"]
    assert (first["epochs"], first["best"]) == (second["epochs"], second["best"])
    model = rank_jobs.net()
    for parameter, value in zip(model.parameters(), first["parameters"], strict=True):
        parameter.data = value
    x, y = rank_jobs.samples(9, 1)
    with torch.no_grad():
        assert first["metrics"]["accuracy"] == (model(x).argmax(1) == y).sum() / 9
        expected = torch.nn.functional.cross_entropy(model(x), y).item()
    assert first["metrics"]["loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("nothing shards", "memfit.Sharding('ddp')"),
        ("sharded twice", "sharded already"),
        ("fsdp2, made before", "optimizer=lambda parameters: Adam(parameters, ...)"),
        ("zero1, scheduler made before", "scheduler=lambda optimizer"),
        ("static graph", "static_graph"),
        ("a part in DDP", "leave out the wrapper"),
        ("step in backward", "step_in_backward"),
        ("cast afterwards", "Precision(autocast=False)"),
        ("others", "a parameter of shape (3,) that DistributedDataParallel does not contain"),
        ("8 bits", "OptimizerState(bits=...)"),
        ("conflict", "It would copy gathered parameters"),
        ("frozen later", "Freeze or unfreeze parameters (requires_grad) before creating the engine"),
        ("tensor parallel", "tensor and pipeline parallelism are not supported"),
        ("arena", "an arena"),
        ("Rprop of shards", "Rprop cannot update parameters that fully_shard divides among the ranks"),
        ("no sync", "None of the optimizer's parameters received a gradient"),
        ("carry", "remainder='carry' needs equally many batches on every rank"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(two_ranks, case, says):
    for kind, message in two_ranks.run("refused", case, module=CASES):
        assert kind == "UsageError"
        assert says in message


def test_the_weight_of_an_ambiguous_batch_among_the_ranks_is_asked_for(two_ranks):
    """It is not 3, for the channels of two images or their three boxes each, and not 1."""
    for kind, message in two_ranks.run("ambiguous_weight", module=CASES):
        assert (kind, "could be 2 samples, or 2 columns of 3" in message) == ("AmbiguousBatchError", True)


def test_the_scheduler_steps_once_per_update_on_every_rank(two_ranks):
    """Row 10: not once per process, and not before a skipped update."""
    rates = two_ranks.run("learning_rates", module=CASES)
    assert rates == [[1.0, 0.5, 0.5, 0.25]] * 2


def test_every_rank_on_the_same_data_is_a_warning_and_own_slices_are_not(two_ranks):
    for texts in two_ranks.run("same_data", module=CASES):
        warned = {name for name, text in texts.items() if text}
        assert warned == {"same", "same, shuffled", "same subset", "same names", "unknown"}
        assert texts["same"].startswith(
            "The loaders of the 2 ranks seem to have the same data: memfit found no difference between their "
            "datasets, and a SequentialSampler does not divide them."
        )
        assert "If each rank's dataset is its own share, nothing is wrong." in texts["unknown"]


def test_a_progress_bar_is_drawn_on_the_first_rank_only(two_ranks):
    first, second = two_ranks.run("progress", module=CASES)
    assert "batches" in first
    assert second == ""


class OtherRankOverflowed(SingleRank):
    """A rank whose own gradients are finite; PyTorch 2.14's GradScaler itself sees the shards of others."""

    def agree(self, *numbers, failure=0):
        return (1.0,)


@pytest.mark.parametrize(("ranks", "scale"), [(OtherRankOverflowed(), 4.0), (SingleRank(), 8.0)])
def test_a_rank_backs_off_if_another_overflowed(ranks, scale):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    scaler = LossScaler(LossScale(init_scale=8.0), "cpu", ranks)
    assert scaler.unscale(torch.optim.SGD([parameter])) is (scale == 4.0)
    scaler.update()
    assert scaler.scale == scale


def test_all_ranks_stop_when_a_callback_of_one_stops(two_ranks):
    assert two_ranks.run("stopped", module=CASES) == [2, 2]
