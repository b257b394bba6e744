"""Set J of benchmarks/accuracy.py: how rows of whole cards are compared with the ghost."""

from pathlib import Path

import pytest

from memfit.devices import find_device
from support import warm_process
from support.modules_by_path import module_of

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
cards = module_of(BENCHMARKS / "published_cards.py")
ROWS = cards.read_rows()
MIB = 1 << 20


def result(published, least, reserved, most, *, job="regnet_y_128gf", batch=8):
    row = cards.CardRow("L40S", job, batch, 8, published)
    return cards.CardResult(row, reserved, least, most, outside=1000, known_outside=1000)


def test_every_row_has_a_script_and_a_card():
    assert len(ROWS) == 194
    for row in ROWS:
        assert (BENCHMARKS / "accuracy" / row.run[0]).is_file()
        find_device(cards.CARDS[row.card])


def test_the_jobs_run_as_their_author_ran_them():
    runs = {row.job: row.run[:-2] for row in ROWS}
    assert runs["bert-fp16"] == ("bert_mlm.py", "--fp16")
    resnet = ("torchvision_classifier.py", "--model", "resnet50", "--tf32", "--fp16", "--channels-last")
    assert runs["resnet50"] == resnet
    assert runs["convnext_large-tf32"][-1] == "--tf32"
    assert runs["regnet_y_128gf"][-2:] == ("--tf32", "--fp16")


def test_a_card_is_predicted_by_the_context_of_another():
    assert all(cards.SAME_CHIP[card] != name for card, name in cards.CARDS.items())
    h100, h200 = find_device("H100-80GB"), find_device("H200")
    assert h100.multiprocessors == h200.multiprocessors
    assert cards.context_of_same_chip("H200") == h100.context_bytes != h200.context_bytes
    l40s, rtx4090 = find_device("L40S"), find_device("RTX 4090")
    share = l40s.multiprocessors / rtx4090.multiprocessors
    assert cards.context_of_same_chip("L40S") == pytest.approx(share * rtx4090.context_bytes, abs=1)


def test_the_context_by_the_rows_leaves_contiguous_convolutions_out():
    some = [
        result(10_900, 0, 10_000, 0, job="bert-fp32"),
        result(10_955, 0, 10_000, 0, job="resnet50"),
        result(12_000, 0, 10_000, 0, job="regnet_y_128gf"),
    ]
    assert "| L40S | 955 | 476 |" in cards.markdown(some)


@pytest.mark.parametrize(
    ("published", "beyond", "difference"), [(10_900, 100, 600), (11_500, 0, 0), (12_300, 300, -800)]
)
def test_a_row_is_compared_with_the_run_and_with_its_range(published, beyond, difference):
    found = result(published, least=10_000, reserved=10_500, most=11_000)
    assert (found.beyond, found.difference) == (beyond, difference)


def test_claims_count_the_rows_that_meet_them():
    inside = result(21_500, 20_000, 20_400, 21_000)
    outside = result(30_000, 20_000, 20_400, 21_000)
    wide = result(21_500, 15_000, 20_400, 21_000)
    met = {what: (of, number) for what, of, number in cards.claims([inside, outside, wide])}
    assert list(met.values()) == [(0, 0), (3, 2), (3, 2), (3, 2), (3, 2)]


@pytest.mark.parametrize(("least", "met"), [(18_850, 1), (18_750, 0)])
def test_a_range_is_at_most_a_tenth_of_the_card_s_figure_wide(least, met):
    claims = {what: count for what, _, count in cards.claims([result(21_500, least, 20_400, 21_000)])}
    assert claims["contiguous convolutions: range at most 10 % wide"] == met


@pytest.mark.parametrize(
    ("published", "reserved", "met"),
    [(10_000, 8_710, 1), (10_000, 8_690, 0), (30_000, 28_410, 1), (30_000, 28_390, 0)],
)
def test_a_card_s_figure_may_miss_by_2_percent_or_300_mib(published, reserved, met):
    found = result(published, reserved, reserved, reserved)
    assert [count for *_, count in cards.claims([found])][-2:] == [met, met]


def test_a_row_outside_the_range_is_listed_with_what_its_context_cannot_explain():
    unsure = 0.21 * find_device("L40S").context_bytes / MIB
    text = cards.markdown([result(22_050 + unsure, 20_000, 20_400, 21_000)])
    assert "| 21,000 to 22,000 | 50 |" in text


def test_a_slope_must_be_within_half_a_percent():
    def series(per_sample):
        return [
            result(100 * batch, 0, per_sample * batch, 0, job="bert-fp32", batch=batch)
            for batch in (1, 8, 16)
        ]

    assert next(cards.claims(series(100.45)))[1:] == (1, 1)
    assert next(cards.claims(series(100.55)))[1:] == (1, 0)
    assert [of for _, of, _ in cards.claims(series(100.45))][1:3] == [0, 0]  # no contiguous convolutions


def test_a_slope_leaves_out_one_sample():
    some = [result(published, 0, 0, 0, batch=batch) for batch, published in ((1, 900), (8, 800), (16, 1_600))]
    assert cards.slope(some, lambda one: one.row.published) == pytest.approx(100)


def test_a_prediction_adds_a_context_and_what_the_driver_reserves():
    row = next(row for row in ROWS if row.card == "H200")
    peaks = {"reserved": 9 * MIB, "least_reserved": 8 * MIB, "most_reserved": 9 * MIB}
    (found,) = cards.predict([row], lambda _options, _run: peaks)
    card = find_device("H200")
    assert found.outside == pytest.approx(
        (find_device("H100-80GB").context_bytes + card.driver_reserved) / MIB
    )
    assert found.known_outside == pytest.approx((card.context_bytes + card.driver_reserved) / MIB)
    assert (found.least, found.reserved, found.most) == (8, 9, 9)


def test_a_row_is_in_the_range_within_the_uncertainty_of_the_context():
    unsure = 0.21 * find_device("L40S").context_bytes / MIB
    for more, met in ((unsure - 1, 1), (unsure + 1, 0)):
        found = result(22_000 + more, 20_000, 20_400, 21_000)
        assert list(cards.claims([found]))[1][1:] == (1, met)


@pytest.mark.slow
@pytest.mark.process
def test_bert_takes_what_it_took_on_the_card(tmp_path):
    rows = {row.batch: row for row in ROWS if (row.card, row.job) == ("L40S", "bert-fp16")}
    reserved = {batch: _reserved(rows[batch].run, tmp_path / f"{batch}.json") / MIB for batch in (8, 24)}
    theirs = rows[24].published - rows[8].published
    assert reserved[24] - reserved[8] == pytest.approx(theirs, abs=10)


def _reserved(run, answer):
    import json

    script, *arguments = run
    options = ("--gpu", "L40S", "--steps", "100", "--json", str(answer))
    command = ("dry-run", *options, "--", str(BENCHMARKS / "accuracy" / script), *arguments)
    assert warm_process.memfit(*command).returncode == 0
    return json.loads(answer.read_text())["peak"]["reserved"]
