"""The sizes of the libraries' workspaces: the answers to the runtime's questions.

    cuDNN call ──> the runtime ──question──> Workspaces.answer ──bytes──> PyTorch allocates them
                                                 │      │
                            the installed cuDNN (cudnn/)   workspaces.toml

A question is a JSON object that describes an operation in full. For a convolution through cuDNN's graph API
the installed cuDNN is queried, where that is possible; all other sizes follow the rules of
``workspaces.toml``. To answer from another source, pass ``Ghost.answer_with`` a function of the same
signature.
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

from memfit.ghost.cudnn.cache import EngineConfig
from memfit.ghost.cudnn.client import CudnnClient, NoCudnnAnswerError
from memfit.ghost.cudnn.descriptors import (
    ENGINEHEUR_MODE,
    HEUR_MODE_FALLBACK,
    CudnnConvolution,
    CudnnDescriptor,
    CudnnOperationGraph,
    CudnnTensorShape,
    cudnn_operation_of_graph,
)
from memfit.ghost.cudnn.server import dotted_version
from memfit.records import Provenance

RULES = Path(__file__).with_name("workspaces.toml")

# Source: cudnn_graph.h 9.24, cudnnDataType_t.
_DATA_TYPES = {0: "float32", 1: "float64", 2: "float16", 3: "int8", 9: "bfloat16"}
# Source: cudnn_adv.h 9.24, cudnnRNNMode_t: ReLU, tanh, LSTM, GRU.
_CELLS = ("RNN", "RNN", "LSTM", "GRU")


class RecurrentPass(msgspec.Struct, frozen=True, tag_field="kind", tag="recurrent"):
    """One pass of a recurrent network."""

    space: str
    """``work``, or ``reserve``: the space that lives from the forward to the backward."""
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
    """``forward``, ``backward``, or ``reserve``: the space that lives from one to the other."""
    mode: int
    operations: int
    x: CudnnTensorShape


class Dropout(msgspec.Struct, frozen=True, tag_field="kind", tag="dropout"):
    """The states of dropout's random number generators."""

    multiprocessors: int
    threads: int
    """Per multiprocessor."""


class CTCLossDescription(msgspec.Struct, frozen=True, tag_field="kind", tag="ctc"):
    """One CTC loss with its gradient."""

    probabilities: CudnnTensorShape
    """Of shape (steps, batch, alphabet)."""
    longest: int
    """The largest number of labels of any sample."""
    algorithm: int


class EngineQuery(msgspec.Struct, frozen=True, tag_field="kind", tag="plan"):
    """A request to choose an engine for a graph of operations."""

    descriptor: CudnnDescriptor
    """The heuristics descriptor, with the graph inside."""


class UnknownOperation(msgspec.Struct, frozen=True, tag_field="kind", tag="unknown"):
    """An operation too large to be described in full."""


Operation = (
    CudnnConvolution
    | RecurrentPass
    | BatchNorm
    | Dropout
    | CTCLossDescription
    | CudnnOperationGraph
    | UnknownOperation
)
Question = Operation | EngineQuery

_SUBJECTS: Mapping[type, str] = {
    CudnnConvolution: "convolutions",
    RecurrentPass: "recurrent networks",
    BatchNorm: "batch normalization",
    Dropout: "the states of dropout between recurrent layers",
    CTCLossDescription: "the CTC loss",
    CudnnOperationGraph: "attention",
    UnknownOperation: "operations with many dimensions",
}


_FROM_CUDNN = (
    "The workspace sizes of convolutions are those that cuDNN {version} chooses for this card. cuDNN was "
    "queried without a GPU; on an H100, it chose other engines for some convolutions, and eight scripts "
    "allocated up to 1.6 % and reserved up to 23 % more than predicted (docs/accuracy.md)."
)
_NOT_TIMED = (
    "With torch.backends.cudnn.benchmark, PyTorch times cuDNN's engines on a card and takes the fastest. "
    "A dry run times nothing and takes the first engine in cuDNN's list. On an H100, timing took 2.5 GiB "
    "for a moment where a dry run has 0.6: cuDNN offers some engines only on a card. PyTorch times in less "
    "memory when less is free."
)
_MISSING_FUNCTIONS = (
    "cuDNN may offer fewer engines here than on a card: memfit's substitute for the driver lacks {names}."
)
_NO_ANSWER = (
    "The installed cuDNN returned no workspace size for {count} distinct convolutions (reason: {reason}), so "
    "memfit applied its own rules."
)


class WorkspaceSource(StrEnum):
    """Where the sizes of library workspaces come from."""

    CUDNN = "cudnn"  # the installed cuDNN where it can be queried, and otherwise the rules
    RULES = "rules"
    NONE = "none"  # 0 bytes for every operation


@dataclass(frozen=True, slots=True)
class WorkspaceSizeByRule:
    """The size that a rule gives, and its source."""

    bytes: int = 0
    name: str = ""
    """The subject of the rule; empty if no rule applies."""
    source: str = ""


@dataclass(frozen=True, slots=True)
class _WorkspaceAnswer:
    """One answer: from cuDNN if it has a version, otherwise from a rule."""

    operation: Operation
    configurations: tuple[EngineConfig, ...]
    version: int = 0
    rule: WorkspaceSizeByRule = WorkspaceSizeByRule()
    refusal: str = ""
    """Why cuDNN gave no answer, if it was queried."""
    timed: bool = False
    """Whether PyTorch would time the configurations on a card."""


def raise_no_cudnn_answer() -> CudnnClient:
    """Stand for a missing cuDNN: raise ``NoCudnnAnswerError``."""
    raise NoCudnnAnswerError("no cuDNN is connected")


class WorkspaceSizes:
    """The answers, and the source of each.

    Args:
        rules: the parsed ``workspaces.toml``.
        source: where sizes come from.
        connect: returns the cuDNN to query; called with the first question for it.

    >>> WorkspaceSizes.read().answer(b'{"kind":"dropout","multiprocessors":132,"threads":2048}')[0].workspace
    6488064
    """

    def __init__(
        self,
        rules: Mapping[str, Any],
        source: WorkspaceSource = WorkspaceSource.RULES,
        connect: Callable[[], CudnnClient] = raise_no_cudnn_answer,
    ) -> None:
        self._rules = rules
        self._source = source
        self._connect = connect
        self._client: CudnnClient | None = None
        self._answers: dict[bytes, _WorkspaceAnswer] = {}

    @classmethod
    def read(
        cls,
        source: WorkspaceSource = WorkspaceSource.RULES,
        connect: Callable[[], CudnnClient] = raise_no_cudnn_answer,
    ) -> "WorkspaceSizes":
        """Return the answers by the rules that ship with memfit."""
        return cls(tomllib.loads(RULES.read_text(encoding="utf-8")), source, connect)

    def answer(self, question: bytes) -> tuple[EngineConfig, ...]:
        """Return engine configurations in order of preference; one of 0 bytes where no size is known."""
        answer = self._answers.get(question)
        if answer is None:
            answer = self._answers[question] = self._find(msgspec.json.decode(question, type=Question))
        return answer.configurations

    def _find(self, question: Question) -> _WorkspaceAnswer:
        if not isinstance(question, EngineQuery):
            return self._by_rule(question)
        operation = cudnn_operation_of_graph(question.descriptor)
        if self._source is not WorkspaceSource.CUDNN or not isinstance(operation, CudnnConvolution):
            return self._by_rule(operation)
        try:
            if self._client is None:
                self._client = self._connect()
            result = self._client.answer(msgspec.json.encode(question.descriptor))
        except NoCudnnAnswerError as error:
            return self._by_rule(operation, str(error))
        is_last_list = question.descriptor.values(ENGINEHEUR_MODE) == (HEUR_MODE_FALLBACK,)
        if is_last_list and not result.configurations:
            reason = "cuDNN has no engine for them; on a card PyTorch may raise an error"
            return self._by_rule(operation, reason)
        return _WorkspaceAnswer(operation, result.configurations, result.version, timed=_benchmarks())

    def _by_rule(self, operation: Operation, refusal: str = "") -> _WorkspaceAnswer:
        rule = WorkspaceSizeByRule() if self._source is WorkspaceSource.NONE else self._rule(operation)
        configs = tuple(EngineConfig(size) for size in dict.fromkeys((rule.bytes, 0)))
        return _WorkspaceAnswer(operation, configs, rule=rule, refusal=refusal)

    def notes(self) -> Iterator[tuple[Provenance, str]]:
        """Yield the sources of the sizes returned so far, one note each."""
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
            yield Provenance.ASSUMED, f"{name} is assumed; the largest is {size:,} bytes. Source: {source}."
        if unknown:
            chosen = self._source is WorkspaceSource.NONE
            reason = "as requested" if chosen else "no sizes are published"
            subjects = ", ".join(unknown)
            scale = "hundreds" if _SUBJECTS[CudnnConvolution] in unknown else "tens"
            text = f"cuDNN's workspaces for {subjects} are counted as 0 bytes ({reason}); on a card they can"
            yield Provenance.ASSUMED, f"{text} take {scale} of MiB."

    def _notes_on_cudnn(self, answers: list[_WorkspaceAnswer]) -> Iterator[tuple[Provenance, str]]:
        for version in sorted({answer.version for answer in answers if answer.version}):
            yield Provenance.SIMULATED, _FROM_CUDNN.format(version=dotted_version(version))
        if any(answer.timed for answer in answers):
            yield Provenance.ASSUMED, _NOT_TIMED
        if self._client is not None and self._client.missed:
            names = ", ".join(sorted(self._client.missed))
            yield Provenance.ASSUMED, _MISSING_FUNCTIONS.format(names=names)
        refusals = Counter(answer.refusal for answer in answers if answer.refusal)
        for reason, count in refusals.items():
            yield Provenance.ASSUMED, _NO_ANSWER.format(count=count, reason=reason)

    def _rule(self, operation: Operation) -> WorkspaceSizeByRule:
        match operation:
            case CudnnConvolution():
                return self._convolution(operation)
            case RecurrentPass():
                return self._recurrent(operation)
            case Dropout():
                return self._dropout(operation)
            case _:
                return WorkspaceSizeByRule()

    def _convolution(self, operation: CudnnConvolution) -> WorkspaceSizeByRule:
        facts = {
            "operation": operation.operation,
            "data_type": _DATA_TYPES.get(operation.x.data_type, ""),
            "x": list(operation.x.sizes),
            "w": list(operation.w.sizes),
            "y": list(operation.y.sizes),
            "padding": list(operation.padding),
            "stride": list(operation.stride),
            "dilation": list(operation.dilation),
            "fused": operation.fused,
        }
        for rule in self._rules["convolution"]:
            if all(rule[name] == fact for name, fact in facts.items() if name in rule):
                return WorkspaceSizeByRule(
                    rule["bytes"], f"cuDNN's workspace for {rule['name']}", rule["source"]
                )
        return WorkspaceSizeByRule()

    def _dropout(self, operation: Dropout) -> WorkspaceSizeByRule:
        rule = self._rules["dropout"]
        size = rule["bytes_per_thread"] * operation.multiprocessors * operation.threads
        return WorkspaceSizeByRule(size, f"cuDNN's memory for {_SUBJECTS[Dropout]}", rule["source"])

    def _recurrent(self, operation: RecurrentPass) -> WorkspaceSizeByRule:
        cell = _CELLS[operation.cell]
        pseudo_layers = operation.layers * operation.directions
        if operation.space == "reserve":
            rule = self._rules["recurrent"][cell]
            vectors = rule["kept"] * pseudo_layers - operation.directions
            size = operation.elements * operation.hidden * vectors * operation.bytes
        else:
            rule = self._rules["recurrent_work"]
            vectors = operation.directions * (rule["vectors"] + rule["vectors_per_layer"] * operation.layers)
            elements = operation.matrices + operation.elements * operation.hidden * vectors
            size = elements * operation.bytes + pseudo_layers * rule["bytes"]
        return WorkspaceSizeByRule(size, f"cuDNN's {operation.space} space of {cell} layers", rule["source"])


def _benchmarks() -> bool:
    """Return whether the script has enabled ``torch.backends.cudnn.benchmark``."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch._C._get_cudnn_benchmark())
