"""Coefficients of a kind of kernel on a card: whose they are, and how certain."""

import itertools

import pytest

from memfit.devices import all_devices, find_device, mig_slices
from memfit.timing.kernel_formulas import COEFFICIENTS, share_of_large_product
from memfit.timing.kernel_times import (
    Basis,
    find_coefficients,
    kernel_table,
    measured_device,
    nearest_relative,
)


def test_every_kind_has_a_time_on_every_card():
    for device in all_devices():
        for kind in kernel_table()["kind"]:
            for without_own in (False, True):
                if without_own and len(kernel_table()["kind"][kind].get("card", {"": 0})) == 1:
                    continue  # no other card has this kind
                fit = find_coefficients(kind, device, without_own=without_own)
                assert set(fit.values) & COEFFICIENTS >= {"floor", "bandwidth"}
                assert fit.spread > 0
    piece = mig_slices(find_device("A100-80GB"))[0]
    assert find_coefficients("product_16", piece).basis is Basis.CARD


def test_no_basis_has_a_narrower_interval_than_a_more_certain_one():
    for kind, table in kernel_table()["kind"].items():
        found = {basis: [] for basis in Basis}
        for device in all_devices():
            fit = find_coefficients(kind, device)
            found[fit.basis].append((fit.spread, fit.long))
            if "like" in table:  # priced as another kind: its interval must be as wide
                other = find_coefficients(table["like"], device)
                found[Basis.RELATIVE] += [(other.spread, other.long)] * (other.basis is Basis.RELATIVE)
        for place in (0, 1):
            spreads = [[each[place] for each in fits] for fits in found.values() if fits]
            assert all(max(one) <= min(other) for one, other in itertools.pairwise(spreads)), kind


@pytest.mark.parametrize(
    ("card", "near"), [("RTX 3090", "RTX 3070"), ("A10", "RTX 3070"), ("L4", "RTX 3070"), ("A100", "T4")]
)
def test_convolutions_carry_over_as_large_products_differ_whatever_the_memory(card, near):
    device, table = find_device(card), kernel_table()["kind"]["convolution_16"]["card"]
    assert nearest_relative(device, [*table], "convolution_16") == near
    ours, theirs = (
        share_of_large_product(find_coefficients("product_16", each).values)
        for each in (device, measured_device(near))
    )
    arithmetic = find_coefficients("convolution_16", device).values["arithmetic"]
    assert arithmetic / table[near]["arithmetic"] == pytest.approx(ours / theirs)
