"""How much memory libraries ask for to work in: the answers to the runtime's questions.

    cuDNN call ──> runtime/spaces.c ──question──> Workspaces.answer ──bytes──> PyTorch allocates them
                                                     workspaces.toml

A question is a JSON object that says in full what is to be done. To answer from elsewhere (a real
library, measurements on a card), give ``Ghost.answer_with`` another function of the same kind.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

RULES = Path(__file__).with_name("workspaces.toml")

# Source: cudnn_graph.h 9.24, cudnnDataType_t.
_DATA_TYPES = {0: "float32", 1: "float64", 2: "float16", 3: "int8", 9: "bfloat16"}
# Source: cudnn_adv.h 9.24, cudnnRNNMode_t: ReLU, tanh, LSTM, GRU.
_CELLS = ("RNN", "RNN", "LSTM", "GRU")


class Tensor(msgspec.Struct, frozen=True):
    """Shape and layout; sizes and strides in elements."""

    data_type: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Convolution(msgspec.Struct, frozen=True, tag_field="kind", tag="convolution"):
    """One convolution. In the backward, ``x``, ``w`` and ``y`` stand for the gradients of their shapes."""

    operation: str
    """``forward``, ``data gradient`` or ``weight gradient``."""
    compute_type: int
    x: Tensor
    w: Tensor
    y: Tensor
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    fused: int
    """Operations that follow in the same graph: bias, activation."""


class Recurrent(msgspec.Struct, frozen=True, tag_field="kind", tag="recurrent"):
    """One pass of a recurrent network."""

    space: str
    """``work``, or ``reserve``: what is kept from the forward to the backward."""
    training: int
    algorithm: int
    cell: int
    bytes: int
    """Of one element."""
    input: int
    hidden: int
    projection: int
    layers: int
    directions: int
    batch: int
    longest: int
    """Steps of the longest sequence."""
    elements: int
    """Vectors in the batch: ``longest * batch`` unless it is packed."""
    matrices: int
    """Elements of all weight matrices."""


class BatchNorm(msgspec.Struct, frozen=True, tag_field="kind", tag="batch norm"):
    """One pass of a batch normalization."""

    space: str
    """``forward``, ``backward``, or ``reserve``: what is kept between the two."""
    mode: int
    operations: int
    x: Tensor


class Dropout(msgspec.Struct, frozen=True, tag_field="kind", tag="dropout"):
    """The states of the generators that dropout draws from."""

    multiprocessors: int
    threads: int
    """Of a multiprocessor."""


class CTC(msgspec.Struct, frozen=True, tag_field="kind", tag="ctc"):
    """One CTC loss with its gradient."""

    probabilities: Tensor
    """Of shape (steps, batch, alphabet)."""
    longest: int
    """Most labels of any sample."""
    algorithm: int


class Graph(msgspec.Struct, frozen=True, tag_field="kind", tag="graph"):
    """A graph of operations without a convolution: attention."""

    operations: int


class Unknown(msgspec.Struct, frozen=True, tag_field="kind", tag="unknown"):
    """A question too long to be asked in full."""


Question = Convolution | Recurrent | BatchNorm | Dropout | CTC | Graph | Unknown

_SUBJECTS: Mapping[type, str] = {
    Convolution: "convolutions",
    Recurrent: "recurrent networks",
    BatchNorm: "batch normalization",
    Dropout: "the states of dropout between recurrent layers",
    CTC: "the CTC loss",
    Graph: "attention",
    Unknown: "operations of many dimensions",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """How many bytes, and why so many."""

    bytes: int
    rule: str
    """What the rule is about; empty where there is none."""
    source: str


class Workspaces:
    """The rules, and which of them were used.

    Args:
        rules: the parsed ``workspaces.toml``.

    >>> Workspaces.read().answer(b'{"kind":"dropout","multiprocessors":108,"threads":2048}')
    0
    """

    def __init__(self, rules: Mapping[str, Any]) -> None:
        self._rules = rules
        self._answers: dict[bytes, Answer] = {}
        self._kinds: dict[bytes, type] = {}

    @classmethod
    def read(cls) -> "Workspaces":
        """Return the rules that memfit comes with."""
        return cls(tomllib.loads(RULES.read_text(encoding="utf-8")))

    def answer(self, question: bytes) -> int:
        """Return how many bytes would be asked for; 0 where no rule says."""
        if question not in self._answers:
            asked = msgspec.json.decode(question, type=Question)
            self._kinds[question] = type(asked)
            self._answers[question] = self._find(asked)
        return self._answers[question].bytes

    def notes(self) -> Iterator[str]:
        """Say what was assumed so far: a sentence per rule, and one for what no rule covers."""
        most: dict[tuple[str, str], int] = {}
        unknown: dict[str, None] = {}
        for question, answer in self._answers.items():
            if answer.rule:
                used = answer.rule, answer.source
                most[used] = max(most.get(used, 0), answer.bytes)
            else:
                unknown[_SUBJECTS[self._kinds[question]]] = None
        for (rule, source), size in most.items():
            yield f"{rule} is assumed, at most {size:,} bytes at once: {source}."
        if unknown:
            yield (
                f"cuDNN's workspaces for {', '.join(unknown)} count as 0 bytes: no figure of theirs is "
                "public, and on a card they can be tens of MiB."
            )

    def _find(self, question: Question) -> Answer:
        match question:
            case Convolution():
                return self._convolution(question)
            case Recurrent():
                return self._recurrent(question)
            case _:
                return Answer(0, "", "")

    def _convolution(self, asked: Convolution) -> Answer:
        facts = {
            "operation": asked.operation,
            "data_type": _DATA_TYPES.get(asked.x.data_type, ""),
            "x": list(asked.x.sizes),
            "w": list(asked.w.sizes),
            "y": list(asked.y.sizes),
            "padding": list(asked.padding),
            "stride": list(asked.stride),
            "dilation": list(asked.dilation),
            "fused": asked.fused,
        }
        for rule in self._rules["convolution"]:
            if all(rule[name] == fact for name, fact in facts.items() if name in rule):
                return Answer(rule["bytes"], f"cuDNN's workspace of {rule['name']}", rule["source"])
        return Answer(0, "", "")

    def _recurrent(self, asked: Recurrent) -> Answer:
        cell = _CELLS[asked.cell]
        rule = self._rules["recurrent"][cell]
        layers = asked.layers * asked.directions
        if asked.space == "reserve":
            vectors = asked.elements * (rule["kept"] * layers - asked.directions)
            elements = vectors * asked.hidden
        else:
            elements = asked.matrices + layers * asked.batch * rule["work"] * asked.hidden
        return Answer(elements * asked.bytes, f"cuDNN's {asked.space} space of {cell} layers", rule["source"])
