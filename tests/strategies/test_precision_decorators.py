"""auto_fp16 and force_fp32 do nothing without Precision, and what MMCV's decorators do with it."""

import copy
import pickle
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import memfit
from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.precision import Precision
from memfit.strategies.precision_decorators import auto_fp16, force_fp32
from memfit.train.engine import Engine


class Pair(NamedTuple):
    left: object
    right: object


class Head(nn.Module):
    """A module whose decorated methods record their arguments."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = {}

    @auto_fp16(apply_to=("x",))
    def low(self, x, y=None, *rest, scale=1.0, **named):
        self.seen = {"x": x, "y": y, "rest": rest, "named": named}
        return self.linear(x[0] if isinstance(x, tuple) else x) * scale

    @auto_fp16(out_fp32=True)
    def low_all(self, x, *rest, **named):
        self.seen = {"x": x, "rest": rest, "named": named}
        return {"y": [self.linear(x)], "name": "head"}

    @auto_fp16(apply_to=("x", "mask"))
    def product(self, x, mask=None):
        return x.prod(-1), mask

    @force_fp32(apply_to=("scores",))
    def full(self, scores, labels):
        self.seen = {"scores": scores, "labels": labels}
        return scores @ scores.T

    @force_fp32(out_fp16=True)
    def full_all(self, scores):
        return scores @ scores.T

    @force_fp32()
    def full_linear(self, x):
        return self.linear(x)

    def forward(self, x):
        return self.full(self.low(x), x)


def dtypes(value):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.dtype, value)


BF16, FP32 = torch.bfloat16, torch.float32
X = torch.ones(2, 4)

MIXED = [Precision("bf16"), Precision("fp16")]
PURE = Precision("bf16", autocast=False)


@pytest.fixture(params=[None, "fp32", "reverted"])
def inert(request):
    head = Head()
    if request.param == "fp32":
        memfit.apply(head, Precision("fp32"))
    if request.param == "reverted":
        memfit.revert(memfit.apply(head, Precision("bf16")))
    return head


def test_without_precision_nothing_is_cast(inert):
    low = X.to(BF16)
    assert inert.low(X).dtype == FP32
    assert inert.seen["x"] is X
    assert inert.full(low, low).dtype == BF16
    assert inert.seen["scores"] is low


@pytest.mark.parametrize("precision", MIXED)
def test_named_arguments_are_cast_and_operations_run_in_low_precision(precision):
    head, low = memfit.apply(Head(), precision), precision.torch_dtype
    assert head.linear.weight.dtype == FP32
    assert head.low(X, X, X, other=X).dtype == low
    assert dtypes(head.seen) == {"x": low, "y": FP32, "rest": (FP32,), "named": {"other": FP32}}
    assert head.low(y=X, x=X).dtype == low
    assert dtypes(head.seen)["x"] == low
    assert dtypes(head.seen)["y"] == FP32
    assert torch.equal(head.low(X, scale=2.0), 2 * head.low(X))


@pytest.mark.parametrize("precision", MIXED)
def test_named_arguments_are_cast_back_and_operations_run_in_float32(precision):
    head, low = memfit.apply(Head(), precision), precision.torch_dtype
    with torch.autocast("cpu", dtype=low):
        assert head.full(X.to(low), X.to(low)).dtype == FP32
        assert (X @ X.T).dtype == low
    assert dtypes(head.seen) == {"scores": FP32, "labels": low}
    assert head.full_linear(X.to(low)).dtype == FP32
    assert head.full_all(X.to(low)).dtype == low


def test_named_arguments_may_be_left_out():
    head = memfit.apply(Head(), Precision("bf16"))
    assert dtypes(head.product(X)) == (FP32, None)
    assert dtypes(head.product(X, mask=X)) == (FP32, BF16)


def test_without_names_all_arguments_are_cast_and_results_get_the_requested_dtype():
    head = memfit.apply(Head(), Precision("bf16"))
    assert dtypes(head.low_all(X, X, other=X)) == {"y": [FP32], "name": "head"}
    assert dtypes(head.seen) == {"x": BF16, "rest": (BF16,), "named": {"other": BF16}}


def test_tensors_in_lists_tuples_and_dicts_are_cast_and_other_objects_stay():
    head = memfit.apply(Head(), Precision("bf16"))
    numbers, whole, double = iter([X]), torch.ones(2, dtype=torch.int64), X.double()
    given = (X, [X, {"a": X, "b": "name"}], Pair(X, None), numbers, whole, double)
    head.low(given)
    found = head.seen["x"]
    assert dtypes(found[:3]) == (BF16, [BF16, {"a": BF16, "b": "name"}], Pair(BF16, None))
    assert found[3] is numbers
    assert found[4] is whole
    assert found[5] is double
    assert next(numbers) is X
    assert given[0].dtype == FP32


def test_in_a_low_precision_model_arguments_are_cast_without_autocast():
    head = memfit.apply(Head(), PURE)
    assert head.low(X).dtype == BF16
    assert head.product(X)[0].dtype == BF16  # autocast would compute it in float32
    assert head.full(X.to(BF16), X).dtype == FP32
    with pytest.raises(RuntimeError, match="dtype"):
        head.full_linear(X)


@pytest.mark.parametrize("precision", [None, Precision("bf16")])
def test_compiled_methods_do_the_same_in_one_graph(precision):
    head = memfit.apply(Head(), precision)
    expected = head(X)
    counter = CompileCounter()
    assert torch.equal(torch.compile(head, backend=counter)(X), expected)
    assert counter.frame_count == 1


def test_the_engine_enables_the_decorators_and_gradients_arrive():
    head = Head()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    seen = []

    def loss(model, batch):
        y = model(batch)
        seen.append((dtypes(model.seen), y.dtype))
        return y.sum()

    before = head.linear.weight.detach().clone()
    Engine(head, [Precision("bf16"), Accumulation(parts_per_batch=2)], optimizer=optimizer, loss=loss).step(X)
    assert seen == [({"scores": FP32, "labels": FP32}, FP32)] * 2
    assert not torch.equal(head.linear.weight, before)


def test_marks_are_in_copies_and_not_in_state_dicts():
    head = Head()
    keys = list(head.state_dict())
    memfit.apply(head, Precision("bf16"))
    assert list(head.state_dict()) == keys
    assert copy.deepcopy(head).low(X).dtype == BF16
    marked = {name: value for name, value in vars(head).items() if "memfit" in name}
    assert b"memfit.strategies" not in pickle.dumps(marked)
    memfit.revert(head)
    assert not any("memfit" in name for name in vars(head))


@pytest.mark.parametrize("precision", [*MIXED, PURE])
def test_a_model_is_freed_when_it_is_deleted(precision):
    head = memfit.apply(Head(), precision)
    alive = weakref.ref(head)
    del head
    assert alive() is None  # without waiting for the garbage collector


def test_decorators_of_inner_modules_are_enabled_too():
    model = nn.Sequential(Head())
    memfit.apply(model, Precision("bf16"))
    assert model[0].low(X).dtype == BF16


class Misused:
    def method(self, x):
        return x

    def generator(self, x):
        yield x

    async def coroutine(self, x):
        return x


@pytest.mark.parametrize("decorator", [auto_fp16, force_fp32])
@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda decorator: decorator(Misused.method), "needs parentheses"),
        (lambda decorator: decorator("x"), "needs parentheses"),
        (lambda decorator: decorator(staticmethod(Misused.method)), "needs parentheses"),
        (lambda decorator: decorator()(staticmethod(Misused.method)), "applied to a staticmethod"),
        (lambda decorator: decorator()(property(Misused.method)), "applied to a property"),
        (lambda decorator: decorator()(Head), "applied to a type"),
        (lambda decorator: decorator()(Misused.generator), "generator is a generator"),
        (lambda decorator: decorator()(Misused.coroutine), "coroutine is a generator or a coroutine"),
        (lambda decorator: decorator(("y",))(Misused.method), "has no argument 'y'. Its arguments are x"),
        (lambda decorator: decorator(("self",))(Misused.method), "has no argument 'self'"),
        (
            lambda decorator: decorator()(Misused.method)(Misused(), X),
            "was called on an object of type Misused",
        ),
        (lambda decorator: decorator()(lambda: X)(), "was called on an object of type NoneType"),
    ],
)
def test_misuse_is_refused_with_or_without_precision(decorator, misuse, words):
    with pytest.raises(UsageError, match=words):
        misuse(decorator)


def test_missing_arguments_raise_pythons_own_error():
    head = memfit.apply(Head(), Precision("bf16"))
    with pytest.raises(TypeError, match="labels"):
        head.full(X)
    assert Head.full.__name__ == "full"
