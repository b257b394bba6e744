"""Splitting batches of every kind into parts."""

import re
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

import memfit
from memfit.errors import AmbiguousBatchError, UsageError
from memfit.strategies.accumulation import even_micro_batch_sizes
from memfit.strategies.mechanisms.split_batch import BatchSplitter


def batch_size(batch):
    return BatchSplitter().size(batch)


def split(batch, sizes):
    return BatchSplitter().split(batch, sizes)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


X, Y = torch.arange(10).reshape(5, 2), torch.arange(5)


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, Y),
        [X, Y],
        {"x": X, "y": Y},
        Pair(X, Y),
        {"x": X, "more": (Y, {"z": X})},
        {"x": X, "epoch": 3, "scale": torch.tensor(2.0), "name": "train"},
        {"x": X, "text": ["a", "b", "c", "d", "e"]},
        {"x": X, "text": ("a", "b", "c", "d", "e")},
        [X, {"y": Y}],
        [X, [Y, Y]],
        [[X, Y], [X, Y]],
        [{"x": X}, {"x": X}, Y],
        OrderedDict(x=X, y=Y),
        defaultdict(list, x=X),
        X.numpy(),
    ],
)
def test_batches_of_every_kind_are_split(batch):
    assert batch_size(batch) == 5
    parts = split(batch, [2, 2, 1])
    assert [batch_size(part) for part in parts] == [2, 2, 1]
    assert all(type(part) is type(batch) for part in parts)


def test_samples_of_different_lengths_are_split():
    samples = [torch.zeros(length) for length in (3, 1, 2, 5, 4)]
    assert batch_size(samples) == 5
    parts = split(samples, [2, 3])
    assert [[len(sample) for sample in part] for part in parts] == [[3, 1], [2, 5, 4]]


def test_values_without_samples_go_to_every_part():
    scale = torch.tensor(2.0)
    parts = split({"x": X, "epoch": 3, "scale": scale}, [4, 1])
    assert [(part["epoch"], part["scale"] is scale) for part in parts] == [(3, True)] * 2
    assert torch.equal(torch.cat([part["x"] for part in parts]), X)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"epoch": 3}, "it contains no tensors, arrays or lists"),
        ((X, torch.zeros(4)), "its parts have the lengths 4, 5"),
    ],
)
def test_a_batch_of_unknown_size_is_refused(batch, words):
    with pytest.raises(UsageError, match=words):
        batch_size(batch)


def test_rows_of_a_tensor_subclass_keep_what_it_gives_them():
    class Titled(torch.Tensor):
        def __getitem__(self, rows):
            part = super().__getitem__(rows)
            part.titles = self.titles[rows]
            return part

    images = torch.ones(4, 2).as_subclass(Titled)
    images.titles = ["a", "b", "c", "d"]
    parts = BatchSplitter().split({"images": images, "labels": torch.ones(4)}, [3, 1])
    assert [part["images"].titles for part in parts] == [["a", "b", "c"], ["d"]]


@pytest.mark.parametrize("samples", range(1, 20))
@pytest.mark.parametrize("parts", range(1, 8))
def test_sizes_differ_by_one_at_most(samples, parts):
    sizes = even_micro_batch_sizes(samples, parts)
    assert sum(sizes) == samples
    assert len(sizes) == min(samples, parts)
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) > 0


class Samples(torch.utils.data.Dataset):
    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.sample(index)


def image(index, height=4):
    return torch.full((3, height, 5), float(index))


SAMPLES = [
    lambda i: (image(i), i, f"{i}.png"),
    lambda i: (image(i), {"y": i, "z": [float(i), f"{i}"]}),
    lambda i: (torch.ones(7) * i, (i, i + 1)),
    lambda i: ((image(i), image(i)), (i, (i, i))),
    lambda i: (image(i), image(i), image(i)),
    lambda i: ({"x": image(i)}, {"x": image(i)}, i),
    lambda i: (f"{i}", b"0"),
    lambda i: {"x": image(i), "paths": (f"{i}.png", [f"{i}", i])},
]


@pytest.mark.parametrize("sample", SAMPLES)
def test_collated_tuples_are_split_by_column(sample):
    dataset = Samples(sample)
    batch = next(iter(DataLoader(dataset, batch_size=6)))
    assert batch_size(batch) == 6
    begin = 0
    for part, size in zip(split(batch, [1, 4, 1]), [1, 4, 1], strict=True):
        assert same(part, default_collate([dataset[begin + i] for i in range(size)]))
        begin += size


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and all(map(same, left, right)) and len(left) == len(right)
    return left == right


def target(index, boxes):
    return {"boxes": torch.full((boxes, 4), float(index)), "labels": torch.full((boxes,), index)}


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("outer", [list, tuple, lambda both: dict(zip("xy", both, strict=True))])
@pytest.mark.parametrize("samples", [2, 3, 4])
@pytest.mark.parametrize("alike", [False, True])
def test_detection_batches_are_split_by_sample(kind, outer, samples, alike):
    """As torchvision's reference scripts collate them: tuple(zip(*samples)). Never along the channels."""
    images = kind(image(i, 4 if alike else 4 + i) for i in range(samples))
    targets = kind(target(i, 1 + i) for i in range(samples))
    batch = outer([images, targets])
    assert batch_size(batch) == samples
    for i, part in enumerate(split(batch, [1] * samples)):
        own_images, own_targets = part.values() if isinstance(part, dict) else part
        assert [x is images[i] for x in own_images] == [True]
        assert [y is targets[i] for y in own_targets] == [True]


@pytest.mark.parametrize(
    "sample",
    [
        lambda i: (image(i), i),
        lambda i: {"image": image(i), "height": 4},
        lambda i: {"input_ids": list(range(1 + i)), "label": i},
        lambda i: (torch.ones(1 + i), "a"),
    ],
)
def test_an_uncollated_list_of_samples_is_split(sample):
    """As with collate_fn=list."""
    batch = [sample(i) for i in range(4)]
    assert batch_size(batch) == 4
    assert [list(map(id, part)) for part in split(batch, [3, 1])] == [
        list(map(id, batch[:3])),
        [id(batch[3])],
    ]


def test_numbers_per_sample_are_split_and_image_sizes_are_not():
    images = tuple(image(i, 4 + i) for i in range(2))
    parts = split((images, (5, 7), tuple(target(i, 1 + i) for i in range(2))), [1, 1])
    assert [part[1] for part in parts] == [(5,), (7,)]
    assert [part["size"] for part in split({"x": X[:2], "size": (5, 7)}, [1, 1])] == [(5, 7)] * 2


@pytest.mark.parametrize(
    "batch",
    [
        [image(0), image(1), image(2), image(3)],
        [image(0), image(1), image(2)],
        ([image(0), image(1), image(2)], torch.arange(3)),
        (torch.stack([image(0), image(1)]), [target(0, 2), target(1, 2)]),
        {"x": [torch.ones(2, 7), torch.ones(2, 7)], "y": torch.ones(2)},
        [[X[:3], X[:1]], [X[:4], X[:2]]],
    ],
)
def test_an_ambiguous_sequence_is_refused_when_it_is_split(batch):
    whole = batch_size(batch)
    assert split(batch, [whole]) == [batch]
    with pytest.raises(UsageError, match=r"samples, or \d columns of \d.*size=lambda.*split=lambda"):
        split(batch, [1] * whole)


IMAGES, BOXES = [image(0), image(1)], [torch.ones(3, 4), torch.ones(3, 4)]


@pytest.mark.parametrize(
    "batch",
    [
        (IMAGES, [target(0, 3), target(1, 3)]),
        (tuple(IMAGES), (target(0, 3), target(1, 3))),
        (IMAGES, BOXES),
        (IMAGES, BOXES, [torch.ones(3), torch.ones(3)]),
        {"images": IMAGES, "boxes": BOXES},
        [(IMAGES[0], BOXES[0]), (IMAGES[1], BOXES[1])],
        [(IMAGES[0], target(0, 3)), (IMAGES[1], target(1, 3))],
        [{"image": IMAGES[0], "boxes": BOXES[0]}, {"image": IMAGES[1], "boxes": BOXES[1]}],
        ([image(0), image(1), image(2), image(3)], [target(i, 3) for i in range(4)]),
        [{"x": X}, {"x": X}],
    ],
)
def test_a_first_batch_whose_number_of_samples_is_ambiguous_is_asked_for(batch):
    """Two images of three channels, each with three boxes: 2 samples, or columns of 3."""
    with pytest.raises(AmbiguousBatchError, match=r"could be \d samples, or \d columns of \d.*size=lambda"):
        batch_size(batch)
    assert split(batch, [2]) == [batch]


def test_earlier_batches_show_what_a_batch_of_three_boxes_each_is():
    splitter = BatchSplitter()
    splitter.split(detection(2, [2, 1]), [1, 1])
    assert splitter.size(detection(2, [3, 3])) == 2


def test_an_ambiguous_batch_is_no_weight_of_1_in_a_validation():
    model = nn.Linear(1, 1)
    engine = memfit.Engine(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda *_: 1.0)
    with pytest.raises(AmbiguousBatchError):
        engine.validate([detection(2, [3, 3])])
    sized = memfit.Engine(
        model, optimizer=engine.optimizer, loss=lambda *_: 1.0, size=lambda batch: len(batch[0])
    )
    assert sized.validate([detection(2, [3, 3])]) == {"loss": 1.0}


def test_the_advice_for_an_unknown_size_works():
    class Batch:
        def __init__(self, x):
            self.x = x

    with pytest.raises(
        UsageError, match=re.escape("two functions to memfit.Engine: size=lambda batch: ..., which")
    ):
        batch_size(Batch(X))


def test_a_defaultdict_stays_a_defaultdict():
    batch = defaultdict(list, x=X)
    part = split(batch, [2, 3])[0]
    assert part["nothing yet"] == []
    assert list(batch) == ["x"], "the batch itself is unchanged"


def test_as_many_columns_as_samples_are_split_as_columns():
    parts = split([X[:2], X[2:4]], [1, 1])
    assert [[x.tolist() for x in part] for part in parts] == [[[[0, 1]], [[4, 5]]], [[[2, 3]], [[6, 7]]]]


def test_empty_samples_stay_empty():
    boxes = [[torch.ones(4)], [], [torch.zeros(4), torch.ones(4)]]
    assert split({"x": X[:3], "boxes": boxes}, [2, 1])[0]["boxes"] == boxes[:2]


def detection(samples, boxes):
    """Return images of one size with the given numbers of boxes, as torchvision's loaders collate them."""
    return [[image(i) for i in range(samples)], [target(i, number) for i, number in enumerate(boxes)]]


def test_lists_of_images_and_boxes_are_split_by_sample_in_every_batch():
    """Where every image has three boxes, the batch alone does not show what its lists hold."""
    splitter = BatchSplitter()
    for boxes in ([2, 1], [3, 3, 3], [3, 3, 3, 3], [4, 4, 4, 4], [2, 2]):
        batch = detection(len(boxes), boxes)
        assert splitter.size(batch) == len(boxes)
        parts = splitter.split(batch, [1] * len(boxes))
        for i, (images, targets) in enumerate(parts):
            assert ([id(x) for x in images], [id(y) for y in targets]) == (
                [id(batch[0][i])],
                [id(batch[1][i])],
            )


def test_a_mask_between_entries_is_not_cut_where_there_are_as_many_samples():
    splitter = BatchSplitter()
    for entries in (5, 4, 6):
        mask = torch.ones(entries, entries, dtype=torch.bool)
        batch = {
            "x": torch.zeros(4, entries, 2),
            "tokens": torch.ones(4, entries, dtype=torch.long),
            "mask": mask,
        }
        for part in splitter.split(batch, [2, 2]):
            assert (part["mask"] is mask, part["x"].shape[0], part["tokens"].shape[0]) == (True, 2, 2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_may_be_cut_is_asked_for_at_the_first_batch(dtype):
    batch = {"x": torch.zeros(4, 4, 2), "mask": torch.ones(4, 4, dtype=dtype)}
    with pytest.raises(UsageError, match=r"batch\['mask'\] is ambiguous. Its 4 rows .* split=lambda"):
        split(batch, [2, 2])


def test_batches_of_unequal_features_and_samples_are_split_without_a_question():
    assert [len(part[0]) for part in split((torch.zeros(4, 4), torch.zeros(4)), [2, 2])] == [2, 2]
    tokens = torch.ones(4, 4, dtype=torch.long)
    assert [len(part["ids"]) for part in split({"ids": tokens, "labels": tokens}, [3, 1])] == [3, 1]


def test_a_part_that_had_a_row_per_sample_by_chance_is_reported():
    splitter = BatchSplitter()
    splitter.split({"x": torch.zeros(2, 3), "boxes": torch.zeros(2, 4)}, [1, 1])
    with pytest.raises(
        UsageError, match=r"batch\['boxes'\] has 5 entries, but in earlier batches it had one per"
    ):
        splitter.split({"x": torch.zeros(2, 3), "boxes": torch.zeros(5, 4)}, [1, 1])


def test_batches_that_are_not_split_are_learned_from():
    splitter = BatchSplitter()
    splitter.observe(detection(2, [2, 1]))
    assert len(splitter.split(detection(3, [3, 3, 3]), [1, 2])[0][0]) == 1
