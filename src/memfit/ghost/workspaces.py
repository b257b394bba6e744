"""How much memory libraries ask for to work in: the answers to the runtime's questions.

    cuDNN call ──> workspaces.c     ──question──> Workspaces.answer ──bytes──> PyTorch allocates them
                                                      │      │
                                 the installed cuDNN (cudnn/)   workspaces.toml

A question is a JSON object that says in full what is to be done. A convolution through cuDNN's graph API
is asked of the installed cuDNN, if it can be asked; the rest follows the rules of ``workspaces.toml``. To
answer from elsewhere, give ``Ghost.answer_with`` another function of the same kind.
"""

import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from memfit.ghost.cudnn.cache import Configuration
from memfit.ghost.cudnn.client import CudnnClient, NoAnswerError
from memfit.ghost.cudnn.descriptors import (
    ENGINEHEUR_MODE,
    HEUR_MODE_FALLBACK,
    Convolution,
    Descriptor,
    Graph,
    Tensor,
    operation_of,
)
from memfit.records import Provenance

RULES = Path(__file__).with_name("workspaces.toml")

# Source: cudnn_graph.h 9.24, cudnnDataType_t.
_DATA_TYPES = {0: "float32", 1: "float64", 2: "float16", 3: "int8", 9: "bfloat16"}
# Source: cudnn_adv.h 9.24, cudnnRNNMode_t: ReLU, tanh, LSTM, GRU.
_CELLS = ("RNN", "RNN", "LSTM", "GRU")


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


class Plan(msgspec.Struct, frozen=True, tag_field="kind", tag="plan"):
    """A graph of operations that cuDNN is to choose an engine for."""

    descriptor: Descriptor
    """Heuristics, with the graph inside."""


class Unknown(msgspec.Struct, frozen=True, tag_field="kind", tag="unknown"):
    """A question too long to be asked in full."""


Operation = Convolution | Recurrent | BatchNorm | Dropout | CTC | Graph | Unknown
Question = Operation | Plan

_SUBJECTS: Mapping[type, str] = {
    Convolution: "convolutions",
    Recurrent: "recurrent networks",
    BatchNorm: "batch normalization",
    Dropout: "the states of dropout between recurrent layers",
    CTC: "the CTC loss",
    Graph: "attention",
    Unknown: "operations of many dimensions",
}


_SAID = (
    "cuDNN's workspaces for convolutions are what cuDNN {version} itself would choose for this card, asked "
    "without one; they were not compared with a real card yet."
)
_TIMED = (
    "With torch.backends.cudnn.benchmark PyTorch times what cuDNN offers and takes the fastest. Nothing is "
    "timed here: it takes the first that cuDNN names."
)
_MISSED = (
    "cuDNN may offer fewer engines here than on a card: it missed {names} in the stand-in for the driver."
)
_REFUSED = "The installed cuDNN did not say what {count} kinds of convolutions work in: {refusal}."


class WorkspaceSource(StrEnum):
    """Who says how much libraries work in."""

    CUDNN = "cudnn"  # the installed cuDNN where it can be asked, and otherwise the rules
    RULES = "rules"
    NONE = "none"  # 0 bytes throughout


@dataclass(frozen=True, slots=True)
class Rule:
    """How many bytes a rule says, and why so many."""

    bytes: int = 0
    name: str = ""
    """What the rule is about; empty where there is none."""
    source: str = ""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was answered: by cuDNN if it has a version, otherwise by a rule."""

    operation: Operation
    configurations: tuple[Configuration, ...]
    version: int = 0
    rule: Rule = Rule()
    refusal: str = ""
    """Why cuDNN did not answer, if it was asked."""
    timed: bool = False
    """Whether PyTorch would time the configurations on a card."""


def nobody() -> CudnnClient:
    """Connect to no cuDNN."""
    raise NoAnswerError("nobody to ask")


class Workspaces:
    """The answers, and which of them rest on what.

    Args:
        rules: the parsed ``workspaces.toml``.
        source: who is asked.
        connect: returns the cuDNN to ask; called when there is something to ask.

    >>> Workspaces.read().answer(b'{"kind":"dropout","multiprocessors":108,"threads":2048}')[0].workspace
    0
    """

    def __init__(
        self,
        rules: Mapping[str, Any],
        source: WorkspaceSource = WorkspaceSource.RULES,
        connect: Callable[[], CudnnClient] = nobody,
    ) -> None:
        self._rules = rules
        self._source = source
        self._connect = connect
        self._client: CudnnClient | None = None
        self._answers: dict[bytes, _Answer] = {}

    @classmethod
    def read(
        cls,
        source: WorkspaceSource = WorkspaceSource.RULES,
        connect: Callable[[], CudnnClient] = nobody,
    ) -> "Workspaces":
        """Return the answers by the rules that memfit comes with."""
        return cls(tomllib.loads(RULES.read_text(encoding="utf-8")), source, connect)

    def answer(self, question: bytes) -> tuple[Configuration, ...]:
        """Return the ways to do what was asked, in order of preference; with 0 bytes where nobody knows."""
        answer = self._answers.get(question)
        if answer is None:
            answer = self._answers[question] = self._find(msgspec.json.decode(question, type=Question))
        return answer.configurations

    def _find(self, question: Question) -> _Answer:
        if not isinstance(question, Plan):
            return self._by_rule(question)
        operation = operation_of(question.descriptor)
        if self._source is not WorkspaceSource.CUDNN or not isinstance(operation, Convolution):
            return self._by_rule(operation)
        try:
            if self._client is None:
                self._client = self._connect()
            said = self._client.answer(msgspec.json.encode(question.descriptor))
        except NoAnswerError as error:
            return self._by_rule(operation, str(error))
        last = question.descriptor.values(ENGINEHEUR_MODE) == (HEUR_MODE_FALLBACK,)
        if last and not said.configurations:
            return self._by_rule(operation, "it named no engine, and on a card PyTorch may refuse them")
        return _Answer(operation, said.configurations, said.version, timed=_timed())

    def _by_rule(self, operation: Operation, refusal: str = "") -> _Answer:
        rule = Rule() if self._source is WorkspaceSource.NONE else self._rule(operation)
        offers = tuple(Configuration(size) for size in dict.fromkeys((rule.bytes, 0)))
        return _Answer(operation, offers, rule=rule, refusal=refusal)

    def notes(self) -> Iterator[tuple[Provenance, str]]:
        """Say what sizes rest on so far, a sentence each."""
        answers = list(self._answers.values())
        yield from self._notes_on_cudnn(answers)
        most: dict[tuple[str, str], int] = {}
        unknown: dict[str, None] = {}
        for answer in answers:
            rule = answer.rule
            if rule.name:
                most[rule.name, rule.source] = max(most.get((rule.name, rule.source), 0), rule.bytes)
            elif not answer.version:
                unknown[_SUBJECTS[type(answer.operation)]] = None
        for (name, source), size in most.items():
            yield Provenance.ASSUMED, f"{name} is assumed, at most {size:,} bytes at once: {source}."
        if unknown:
            chosen = self._source is WorkspaceSource.NONE
            why = "as asked for" if chosen else "no figure of theirs is public"
            text = f"cuDNN's workspaces for {', '.join(unknown)} count as 0 bytes ({why}); on a card they can"
            yield Provenance.ASSUMED, f"{text} be tens of MiB."

    def _notes_on_cudnn(self, answers: list[_Answer]) -> Iterator[tuple[Provenance, str]]:
        for version in sorted({answer.version for answer in answers if answer.version}):
            yield Provenance.SIMULATED, _SAID.format(version=_spelled(version))
        if any(answer.timed for answer in answers):
            yield Provenance.ASSUMED, _TIMED
        if self._client is not None and self._client.missed:
            yield Provenance.ASSUMED, _MISSED.format(names=", ".join(sorted(self._client.missed)))
        refusals = Counter(answer.refusal for answer in answers if answer.refusal)
        for refusal, count in refusals.items():
            yield Provenance.ASSUMED, _REFUSED.format(count=count, refusal=refusal)

    def _rule(self, operation: Operation) -> Rule:
        match operation:
            case Convolution():
                return self._convolution(operation)
            case Recurrent():
                return self._recurrent(operation)
            case _:
                return Rule()

    def _convolution(self, asked: Convolution) -> Rule:
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
                return Rule(rule["bytes"], f"cuDNN's workspace of {rule['name']}", rule["source"])
        return Rule()

    def _recurrent(self, asked: Recurrent) -> Rule:
        cell = _CELLS[asked.cell]
        rule = self._rules["recurrent"][cell]
        layers = asked.layers * asked.directions
        if asked.space == "reserve":
            vectors = asked.elements * (rule["kept"] * layers - asked.directions)
            elements = vectors * asked.hidden
        else:
            elements = asked.matrices + layers * asked.batch * rule["work"] * asked.hidden
        return Rule(elements * asked.bytes, f"cuDNN's {asked.space} space of {cell} layers", rule["source"])


def _timed() -> bool:
    """Say whether the script has PyTorch time what cuDNN offers."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch._C._get_cudnn_benchmark())


def _spelled(number: int) -> str:
    """Spell a version.

    >>> _spelled(92400)
    '9.24.0'
    """
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
