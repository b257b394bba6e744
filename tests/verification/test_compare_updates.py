"""What the gradients of three runs say about a plan."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from memfit.records import Equality, InputTensor
from memfit.verification.compare_updates import (
    FirstUpdateRun,
    gradient_difference,
    gradients_keep_promise,
    have_same_inputs,
    largest_allowed_difference,
    why_runs_not_comparable,
)
from memfit.verification.first_update_process import FirstUpdate, SavedGradient


def fed(*rows):
    """Return the input of a call whose rows have these digests."""
    return InputTensor("int64", (len(rows),), (rows,))


ROW, OTHER = (fed("row"),), (fed("other"),)


@pytest.fixture
def run(tmp_path):
    """Return a function that writes gradients, and returns the run that has them."""

    def written(inputs=ROW, arithmetic="float32", **gradients):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        saved = []
        for number, (name, value) in enumerate(gradients.items()):
            tensor = torch.as_tensor(value)
            np.save(folder / f"{number}.npy", tensor.reshape(-1).view(torch.uint8).numpy())
            saved.append(SavedGradient(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        return FirstUpdateRun(folder, FirstUpdate(tuple(saved), inputs, arithmetic))

    return written


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_differences_are_relative_to_the_parameter_s_largest_gradient(run, dtype):
    one = run(a=torch.tensor([1.0, -4.0], dtype=dtype), b=torch.tensor([8.0], dtype=dtype))
    found = gradient_difference(
        one, run(a=torch.tensor([1.0, -3.0], dtype=dtype), b=torch.tensor([8.0], dtype=dtype))
    )
    assert (found.parameters, found.equal, found.largest, found.parameter) == (2, 1, 0.25, "a")


def test_sums_over_micro_batches_are_divided_by_their_number(run):
    assert gradient_difference(run(a=[1.5]), run(a=[3.0]), parts=2).largest == 0
    assert gradient_difference(run(a=[1.5]), run(a=[1.5]), parts=2).largest == 0.5


def test_gradients_that_are_nothing_but_rounding_are_compared_with_the_model_s_largest(run):
    found = gradient_difference(run(key=[1e-9], other=[1.0]), run(key=[-1e-9], other=[1.0]))
    assert found.largest == pytest.approx(2e-6)


@pytest.mark.parametrize(
    "other", [{}, {"a": [1.0, 2.0]}, {"b": [1.0]}, {"a": [1.0], "b": [1.0]}, {"a": [float("nan")]}]
)
def test_gradients_that_are_missing_or_not_finite_differ_without_bound(run, other):
    assert gradient_difference(run(a=[1.0]), run(**other)).largest == float("inf")


def test_the_same_bits_are_equal_also_if_they_are_no_number(run):
    assert gradient_difference(run(a=[float("nan")]), run(a=[float("nan")])).equal == 1


@pytest.mark.parametrize(
    ("planned", "equality", "kept"),
    [
        ([1.0], Equality.BITWISE, True),
        ([1.0 + 1e-6], Equality.BITWISE, False),
        ([1.0 + 1e-6], Equality.ROUNDING, True),
        ([1.0 + 1e-4], Equality.ROUNDING, False),
        ([2.0], Equality.OTHER, True),
    ],
)
def test_a_plan_keeps_what_it_promises(run, planned, equality, kept):
    plain, other = run(a=[1.0]), run(a=planned)
    bound = largest_allowed_difference(equality, "float32")
    assert gradients_keep_promise(plain, other, gradient_difference(plain, other), bound) is kept


def test_lower_precision_may_differ_by_more():
    bounds = [
        largest_allowed_difference(Equality.ROUNDING, kind)
        for kind in ("float64", "float32", "tf32", "bfloat16")
    ]
    assert bounds == sorted(bounds)


@pytest.mark.parametrize(
    ("calls", "same"),
    [
        ([fed("a", "b")], True),
        ([fed("a"), fed("b")], True),
        ([fed("b"), fed("a")], False),
        ([fed("a")], False),
        ([fed("a", "b"), fed("a", "b")], True),  # positions, or a mask, for each of two micro-batches
        ([fed("a", "c"), fed("a", "c")], False),
        ([], False),
    ],
)
def test_inputs_are_the_same_in_parts_of_a_batch_or_in_each_call(run, calls, same):
    parts = 1 if calls == [fed("a", "b")] else 2
    assert have_same_inputs(run(inputs=(fed("a", "b"),)), run(inputs=tuple(calls)), parts) is same


def test_runs_that_cannot_tell_are_not_comparable(run):
    plain, planned = run(a=[1.0]), run(a=[2.0])
    for again, under, why in (
        (run(a=[3.0]), planned, "does not compute the same gradients twice"),
        (run(a=[1.0], inputs=OTHER), planned, "other inputs each time"),
        (plain, run(a=[2.0], inputs=OTHER), "it draws smaller batches in another way"),
        (plain, run(a=[2.0], inputs=(fed("a", "b"), fed("c"))), "sees 3 numbers of input instead of 1"),
        (run(a=[1.0]), planned, ""),
    ):
        found = why_runs_not_comparable(plain, again, under, gradient_difference(plain, again), 0.0)
        assert why in found
        assert bool(why) is bool(found)
    other_inputs = run(a=[1.0], inputs=OTHER)
    assert not gradients_keep_promise(plain, other_inputs, gradient_difference(plain, other_inputs), 0.0)
    nothing = replace(plain, update=FirstUpdate())
    same = gradient_difference(nothing, nothing)
    assert not gradients_keep_promise(nothing, nothing, same, 0.0)
    assert "No parameter has a gradient" in why_runs_not_comparable(nothing, nothing, nothing, same, 0.0)


def test_no_plan_may_lose_a_gradient(run):
    plain, planned = run(a=[1.0]), run(a=[float("nan")])
    assert not gradients_keep_promise(
        plain,
        planned,
        gradient_difference(plain, planned),
        largest_allowed_difference(Equality.OTHER, "float32"),
    )
