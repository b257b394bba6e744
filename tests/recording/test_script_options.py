"""The script's own options that memory depends on, as its parser sees them, and its loader's batch size."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from memfit.recording.script_loaders import ScriptLoaders
from memfit.recording.script_options import ScriptOptionCollector
from memfit.records import LoaderBatchSize, ScriptOption, ScriptOptionPurpose


@pytest.fixture
def options():
    """Follow argparse and click; return what collects their options."""
    collected = ScriptOptionCollector()
    collected.install()
    yield collected
    collected._hooks.remove()


def parser(*names, **settings):
    """Return a parser with one option."""
    made = argparse.ArgumentParser()
    made.add_argument(*names, **settings)
    return made


def found(options, monkeypatch, made, *arguments):
    """Return what one parser adds to the options: names, words and values."""
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    made.parse_args()
    return [(option.purpose.value, " ".join(option.words), option.value) for option in options.found()]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (parser("-b", "--batch-size", type=int, default=64), ("batch size", "-b", 64)),
        (parser("--per_device_train_batch_size", type=int, default=8),
         ("batch size", "--per_device_train_batch_size", 8)),
        (parser("--gradient_accumulation_steps", type=int, default=1),
         ("accumulation steps", "--gradient_accumulation_steps", 1)),
        (parser("--grad-checkpointing", action="store_true"), ("checkpointing", "--grad-checkpointing", 0)),
        (parser("--bf16", action=argparse.BooleanOptionalAction, default=True),
         ("low precision", "--bf16", 1)),
        (parser("--fp16", type=bool, default=False), ("low precision", "--fp16 True", 0)),
        (parser("--mixed_precision", choices=["no", "fp16", "bf16"]),
         ("low precision", "--mixed_precision bf16", 0)),
        (parser("--mixed-precision", choices=["no", "fp16"], default="fp16"),
         ("low precision", "--mixed-precision fp16", 1)),
    ],
)  # fmt: skip
def test_an_option_has_its_words_and_its_value(options, monkeypatch, made, expected):
    assert found(options, monkeypatch, made) == [expected]


@pytest.mark.parametrize(
    "made",
    [
        parser("--token", default="hf_secret"),  # not in the table
        parser("--batch-size", default="64"),  # not a number
        parser("--batch-size", type=int),  # unset
        parser("--amp", default="O1"),  # memfit does not know what turns it on
        parser("batch", type=int, nargs="?", default=4),  # no option
    ],
)
def test_other_options_are_not_kept(options, monkeypatch, made):
    assert found(options, monkeypatch, made) == []


def test_values_are_those_of_the_command_line_and_the_most_specific_name_comes_first(options, monkeypatch):
    made = parser("--batch-size", type=int)
    made.add_argument("--train_batch_size", type=int, default=8)
    assert found(options, monkeypatch, made, "--batch-size=4") == [
        ("batch size", "--train_batch_size", 8),
        ("batch size", "--batch-size", 4),
    ]


def test_only_parsers_of_the_command_line_count(options, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3", "--bs", "2"])
    parser("--batch-size", type=int).parse_args(["--batch-size", "4"])
    assert options.found() == ()
    rest = parser("--epochs", type=int).parse_known_args()[1]
    parser("--bs", type=int).parse_args(rest)  # a second parser reads what the first has left
    assert options.found() == (ScriptOption(ScriptOptionPurpose.BATCH_SIZE, ("--bs",), 2),)


@pytest.mark.parametrize(
    ("word", "option"),
    [
        ("--batch_size=8", ScriptOption(ScriptOptionPurpose.BATCH_SIZE, ("--batch_size=",), 8)),
        ("trainer.batch_size=8", ScriptOption(ScriptOptionPurpose.BATCH_SIZE, ("trainer.batch_size=",), 8)),
        ("+accum_steps=2", ScriptOption(ScriptOptionPurpose.ACCUMULATION, ("+accum_steps=",), 2)),
        ("--bf16=True", None),  # memfit does not know which words the script takes
        ("--batch_size=auto", None),
        ("--batch_size=0", None),
        ("eval.batch_size=8", None),
        ("batch_size", None),
    ],
)
def test_words_with_a_value_are_options_of_scripts_that_read_them_themselves(
    options, monkeypatch, word, option
):
    monkeypatch.setattr(sys, "argv", ["train.py", word])
    assert options.found() == (() if option is None else (option,))
    if option is not None:
        assert option.with_value(4) == (word[:-1] + "4",)


def test_what_a_parser_has_read_is_no_word_of_the_scripts_own(options, monkeypatch):
    made = parser("--batch-size", type=int, default=4)
    made.add_argument("overrides", nargs="*")
    assert found(options, monkeypatch, made, "bs=2", "accum_steps=3") == [
        ("batch size", "--batch-size", 4),
        ("accumulation steps", "accum_steps=", 3),
    ]


def test_parsers_of_transformers_are_followed(options, monkeypatch):
    from transformers import HfArgumentParser

    @dataclass
    class Arguments:
        per_device_train_batch_size: int = 8
        gradient_checkpointing: bool = None  # as in transformers.TrainingArguments

    monkeypatch.setattr(sys, "argv", ["train.py", "--per_device_train_batch_size", "2"])
    HfArgumentParser(Arguments).parse_args_into_dataclasses()
    assert [(option.words, option.value) for option in options.found()] == [
        (("--per_device_train_batch_size",), 2),
        (("--gradient_checkpointing",), 0),
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", *options.found()[1].words])  # alone, it turns itself on
    (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    assert arguments.gradient_checkpointing


def test_options_of_click_are_kept(options, monkeypatch):
    @click.command()
    @click.option("--batch-size", default=64)
    @click.option("--amp/--no-amp", default=False)
    @click.option("--mixed-precision", type=click.Choice(["no", "bf16"]), default="no")
    def train(batch_size, amp, mixed_precision):
        assert (batch_size, amp, mixed_precision) == (32, False, "no")

    monkeypatch.setattr(sys, "argv", ["train.py", "--batch-size", "32"])
    train(standalone_mode=False)
    assert [(option.words, option.value) for option in options.found()] == [
        (("--batch-size",), 32),
        (("--mixed-precision", "bf16"), 0),
        (("--amp",), 0),
    ]


@pytest.fixture
def loaders():
    """Follow loaders; return what knows the last one."""
    followed = ScriptLoaders()
    followed.install()
    yield followed
    followed._hooks.remove()


def test_the_loader_read_last_has_a_batch_size_and_a_line(loaders):
    data = torch.arange(8)
    first, unread = DataLoader(data, 4), DataLoader(data, batch_size=2)
    line = sys._getframe().f_lineno - 1
    assert loaders.last is None
    next(iter(first))
    assert loaders.last == LoaderBatchSize(4, f"{__file__}:{line}", samples=8)
    next(iter(DataLoader(data, batch_size=None)))  # without batches of its own
    next(iter(DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, drop_last=False))))
    assert loaders.last.size == 4
    next(iter(unread))
    assert loaders.last.size == 2


def test_a_loader_that_a_library_creates_has_the_line_of_the_script_that_called_it(loaders, monkeypatch):
    library = str(Path(torch.__file__).parents[1] / "trainers" / "loop.py")
    names = {"__name__": "trainers.loop", "DataLoader": DataLoader}
    code = compile("def fit(data):\n    return next(iter(DataLoader(data, 4)))", library, "exec")
    exec(code, names)  # noqa: S102 - a function of an installed package
    names["fit"](torch.arange(8))
    line = sys._getframe().f_lineno - 1
    assert loaders.last == LoaderBatchSize(4, f"{__file__}:{line}", "trainers", samples=8)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(1000))


def test_a_loader_that_does_not_know_how_many_samples_it_has_says_so(loaders):
    next(iter(DataLoader(Endless(), batch_size=4)))
    assert (loaders.last.size, loaders.last.samples) == (4, None)
