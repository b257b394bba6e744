"""What a search among sampled elements finds is bounded by how many were sampled by another rule."""

import random
from functools import partial

import pytest
import torch
from torch.utils.weak import TensorWeakRef

from memfit.ghost.values.known_values import KnownValues
from memfit.ghost.values.propagation_rules import RULES, KnownInputs, pointwise_value, union_of_known_indices
from memfit.ghost.values.tensor_facts import KnownIndices, KnownValue
from support.scripts import check

pytestmark = pytest.mark.warm

SAMPLER = """
    labels = torch.randint(-1, 3, (1000,), device=d)
    def sample(labels, positives, total):
        positive, negative = torch.where(labels >= 1)[0], torch.where(labels == 0)[0]
        count = min(positive.numel(), positives)
        order = torch.randperm(positive.numel(), device=d)[:count]
        other = torch.randperm(negative.numel(), device=d)[: min(negative.numel(), total - count)]
        return positive[order], negative[other]
    positive, negative = sample(labels, 128, 512)
    def mask(*indices):
        chosen = torch.zeros_like(labels, dtype=torch.uint8)
        for index in indices: chosen[index] = 1
        return chosen
    sampled = torch.where(mask(positive) | mask(negative))[0]
"""


def test_a_search_for_objects_among_samples_finds_at_most_the_positive_ones(evaluate):
    check(
        evaluate,
        {
            "len(sampled)": 512,
            "len(torch.where(labels[sampled] > 0)[0])": 128,
            "len(torch.where(labels[sampled] == 0)[0])": 512,
            "len(torch.where(torch.cat([labels[sampled], labels[sampled]]) > 0)[0])": 256,
            "len(labels[torch.cat([positive, negative])].nonzero())": 128,
            "len(labels[torch.where(mask(positive, negative))[0]].nonzero())": 128,
            "len(labels[torch.where(mask(negative))[0]].nonzero())": 0,
            "len(labels[negative[:9]].nonzero())": 0,
            "len(labels[sampled.to(torch.int64)[:200]].nonzero())": 128,
        },
        before=SAMPLER,
    )


def test_samples_of_one_class_bound_what_is_found_outside_it(evaluate):
    """As detectron2 samples: the background is a class of its own, and ignored proposals are -1."""
    check(
        evaluate,
        {
            "len(((labels[both] != -1) & (labels[both] != 80)).nonzero())": 64,
            "len((labels[both] == 80).nonzero())": 256,
        },
        before=SAMPLER
        + """
    background = torch.where(labels == 80)[0]
    objects = torch.where((labels != -1) & (labels != 80))[0]
    both = torch.cat([objects[:64], background[:192]])
    """,
    )


def test_views_that_repeat_elements_repeat_their_exceptions(evaluate):
    check(
        evaluate,
        {
            "len(mask[:, None].expand(1000, 64).nonzero())": 150 * 64,
            "len(x[mask[:, None].expand_as(x)])": 150 * 64,
            "len((mask.expand(50, 1000) == True).nonzero())": 150 * 50,
            "len(mask.expand(50, 1000).to(torch.uint8).nonzero())": 150 * 50,
            "len(mask[:10].unfold(0, 3, 1).nonzero())": 8 * 3,
            "len(mask.as_strided((8, 3), (1, 1)).nonzero())": 8 * 3,
            "len(mask[::2].nonzero())": 150,
            "len(labels[sampled[-1:].expand(50)].nonzero())": 50,
        },
        before=SAMPLER
        + """
    mask = torch.zeros(1000, dtype=torch.bool, device=d)
    mask[torch.randint(1000, (150,), device=d)] = True
    x = torch.zeros(1000, 64, device=d)
    """,
    )


def test_assumed_masks_bound_no_selection(evaluate):
    """Membership is assumed to be False: that is no bound on how many are members."""
    check(
        evaluate,
        {
            "len(labels[torch.where(mask(negative) | torch.isin(labels, labels))[0]].nonzero())": 1000,
            "len(labels[torch.where(mask(negative) | (labels != labels).any())[0]].nonzero())": 1000,
            "len(labels[torch.where(mask(negative).bool() | torch.isnan(x[0, 0]))[0]].nonzero())": 1000,
        },
        before=SAMPLER,
    )


def test_a_tensor_that_took_another_ones_memory_is_not_taken_for_it():
    """Each batch's labels die with it, and the storage of the next batch's may have the same address."""
    known, labels, earlier = KnownValues(), torch.zeros(5), torch.zeros(5)
    now = known.state(labels)
    before = now._replace(tensor=TensorWeakRef(earlier))
    alike = [(3, KnownIndices(now, 0)), (4, KnownIndices(known.state(labels), 0))]
    assert union_of_known_indices(alike).others == 0
    del earlier
    assert union_of_known_indices([alike[0], (4, KnownIndices(before, 0))]).others == 4


def test_swapped_tensors_and_keywords_of_scatter_work_as_without_the_ghost(evaluate):
    check(
        evaluate,
        {
            "torch.utils.swap_tensors(labels, torch.ones(1000, dtype=torch.long, device=d))": None,
            "len(empty.scatter_(dim=0, index=negative, value=1).nonzero())": 384,
            "len(torch.zeros_like(empty).scatter_(0, index=negative, value=1).nonzero())": 384,
            "len(torch.zeros_like(empty).scatter_(dim=0, index=negative, src=labels).nonzero())": 384,
        },
        before=SAMPLER + "    empty = torch.zeros(1000, dtype=torch.long, device=d)\n",
    )


@pytest.mark.parametrize(
    "write",
    [
        "labels.add_(1)",
        "labels[3:].zero_()",
        "labels.data_ptr()",
        "sampled.add_(1)",
        "sampled.data[0] = 0",
        "labels = labels.clone()",
        "labels = labels[1:]",
        "sampled = sampled[sampled]",
        "negative = negative + 1; sampled = torch.where(mask(negative))[0]",
        "chosen = mask(negative); chosen.add_(1); sampled = torch.where(chosen)[0]",
        "sampled = torch.where(mask(negative)[1:])[0]",
        "sampled = torch.where(~mask(negative).bool())[0]",
        "sampled = torch.where(mask(negative).view(10, 100))[0]",
        "sampled = torch.where(labels != 0)[0]",
        "sampled = torch.where(labels.view(10, 100) == 0)[1]",
        "sampled = torch.where(labels == 0.5)[0]",
    ],
)
def test_what_is_known_of_samples_is_never_stale(evaluate, write):
    found = evaluate(["len(labels[sampled].nonzero()) == len(sampled)"], before=SAMPLER + f"    {write}\n")
    assert found == [True]


def test_rules_never_claim_more_than_the_values_show():
    """Random programs over small vectors on the CPU, where values can be compared with the claims."""
    assert sum(Program(seed).run(steps=25) for seed in range(300)) > 2_000


class Program:
    """A random program over vectors; each step derives one by the rules, and checks what they claim of it."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.chance = random.Random(seed)  # noqa: S311 - no secret depends on it
        self.known = KnownValues()
        self.inputs = KnownInputs(self.known)
        self.labels = torch.randint(-1, 3, (12,))
        self.vectors = [self.labels, torch.arange(3)]
        self.claims = 0

    def run(self, steps):
        """Return how many claims were checked."""
        for _ in range(steps):
            kinds = [self.equal, self.search, self.take, self.join, self.write, self.combine, self.invert]
            self.chance.choice(kinds)()
        return self.claims

    def apply(self, op, *args):
        name, _, overload = op.partition(".")
        of_op = getattr(getattr(torch.ops.aten, name), overload or "default")
        fact = RULES.get(op, partial(pointwise_value, of_op))(self.inputs, *args)
        result = of_op(*args)
        self.add(result, fact)

    def add(self, result, fact):
        self.known.put(result, fact, fresh=True)
        vector = result[:, 0] if result.dim() > 1 else result  # of nonzero
        self.vectors.append(vector)
        known = self.known.mostly(vector)
        if known is not None:
            different = (vector != known.value).nonzero()[:, 0]
            assert len(different) <= known.exceptions
            self.check(known.selection, different)
        self.check(self.known.selection(vector), vector)

    def check(self, selection, indices):
        if selection is not None:
            self.claims += 1
            assert int((self.labels[indices] != selection.value).sum()) <= selection.others

    def any_of(self, kind):
        return self.chance.choice([vector for vector in self.vectors if kind(vector)] or [torch.arange(3)])

    def indices(self):
        """Return indices of the labels."""
        return self.any_of(lambda v: v.dtype == torch.int64 and len(v) and v.min() >= 0 and v.max() < 12)

    def a_mask(self):
        return self.any_of(lambda v: v.dtype == torch.bool and len(v) == len(self.labels))

    def equal(self):
        self.apply("eq.Scalar", self.labels, self.chance.choice([-1, 0, 1]))

    def search(self):
        self.apply("nonzero", self.a_mask())

    def take(self):
        taken = self.chance.choice([self.labels, self.indices()])
        index = self.indices()[: self.chance.randint(1, 12)]
        if index.max() < len(taken):
            self.apply("index.Tensor", taken, [index])

    def join(self):
        self.apply("cat", [self.indices() for _ in range(self.chance.randint(1, 3))])

    def write(self):
        """Write to a mask, as the wrapped ``__setitem__`` does on the ghost."""
        index = self.indices()
        mask = torch.zeros(len(self.labels), dtype=torch.bool)
        mask[index] = True
        where = union_of_known_indices([(0, None), (len(index), self.known.selection(index))])
        self.add(mask, KnownValue(False, exceptions=len(index), selection=where))

    def combine(self):
        a, b = self.a_mask(), self.a_mask()
        if len(a) == len(b):
            self.apply(f"bitwise_{self.chance.choice(['or', 'and', 'xor'])}.Tensor", a, b)

    def invert(self):
        self.apply("bitwise_not", self.a_mask())
