"""cuDNN's answers of earlier runs, in a file in the user's cache folder.

A file holds the answers of one cuDNN for one device under one environment, one JSON object per line. Lines
are only ever appended, each with a single write under a lock, so runs can share the file. Damaged lines are
skipped.
"""

import fcntl
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

MAX_FILE_BYTES = 64 << 20
"""A file of this size is not extended any further; it holds some 30,000 answers."""
_VARIABLES = ("CUDNN_", "NVIDIA_TF32_OVERRIDE")  # the environment variables that cuDNN itself reads


class EngineConfig(msgspec.Struct, frozen=True, array_like=True):
    """One of cuDNN's engine configurations for an operation."""

    workspace: int
    """Bytes."""
    engine: int = 0
    """Its index among the engines for this operation."""
    numerical_notes: int = 0
    """``cudnnBackendNumericalNote_t`` as bits: tensor cores, not deterministic."""
    behavior_notes: int = 0
    """``cudnnBackendBehaviorNote_t`` as bits."""


class HeuristicsResult(msgspec.Struct, frozen=True):
    """The engine configurations that one cuDNN returns for one question, in its own order."""

    version: int
    """As ``cudnnGetVersion`` reports it: 92400."""
    configurations: tuple[EngineConfig, ...]


class _CacheLine(msgspec.Struct, frozen=True):
    question: str
    answer: HeuristicsResult


class HeuristicsCache:
    """The answers in one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answers: dict[str, HeuristicsResult] | None = None

    @classmethod
    def of(cls, folder: Path, library: Path, properties: Mapping[str, object]) -> "HeuristicsCache":
        """Return the cache in ``folder`` for one libcudnn, one device and the current environment."""
        environment = sorted((name, text) for name, text in os.environ.items() if name.startswith(_VARIABLES))
        parts = [(path.name, path.stat().st_size) for path in sorted(library.parent.glob("libcudnn*.so*"))]
        key = repr((parts, sorted(properties.items()), environment)).encode()
        return cls(folder / f"{hashlib.sha256(key).hexdigest()[:16]}.jsonl")

    def get(self, question: bytes) -> HeuristicsResult | None:
        """Return the cached answer to a question, or None."""
        if self._answers is None:
            self._answers = dict(self._read())
        return self._answers.get(_key(question))

    def put(self, question: bytes, answer: HeuristicsResult) -> None:
        """Cache an answer; if the file cannot be written, for this run only."""
        if self._answers is None:
            self._answers = dict(self._read())
        self._answers[_key(question)] = answer
        line = msgspec.json.encode(_CacheLine(_key(question), answer))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if file.tell() < MAX_FILE_BYTES:
                    file.write(b"\n" + line + b"\n")  # an earlier writer may have died within a line
        except OSError:
            return

    def _read(self) -> list[tuple[str, HeuristicsResult]]:
        try:
            lines = self._path.read_bytes().split(b"\n")
        except OSError:
            return []
        found = []
        for line in filter(None, lines):
            try:
                cached = msgspec.json.decode(line, type=_CacheLine)
            except msgspec.DecodeError:  # a partial line, or one that memfit did not write
                continue
            found.append((cached.question, cached.answer))
        return found


def _key(question: bytes) -> str:
    return hashlib.sha256(question).hexdigest()[:32]
