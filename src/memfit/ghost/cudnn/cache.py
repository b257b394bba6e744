"""Answers of cuDNN from earlier runs, in a file of the user's cache folder.

A file holds what one cuDNN said of one device under one environment, a JSON object a line. Lines are only
ever added, each by one write under a lock, so runs can share it; one that is damaged is passed over.
"""

import fcntl
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

MOST_BYTES = 64 << 20
"""A file that has grown to this gets no more; some 30,000 answers."""
_VARIABLES = ("CUDNN_", "NVIDIA_TF32_OVERRIDE")  # what cuDNN itself is told by the environment


class Configuration(msgspec.Struct, frozen=True, array_like=True):
    """One way of cuDNN's to do what was asked."""

    workspace: int
    """Bytes."""
    engine: int = 0
    """Its index among the engines for this operation."""
    numerical_notes: int = 0
    """``cudnnBackendNumericalNote_t`` as bits: tensor cores, not deterministic."""
    behavior_notes: int = 0
    """``cudnnBackendBehaviorNote_t`` as bits."""


class Answer(msgspec.Struct, frozen=True):
    """What one cuDNN offers for one question, in its own order."""

    version: int
    """As ``cudnnGetVersion`` says it: 92400."""
    configurations: tuple[Configuration, ...]


class _Line(msgspec.Struct, frozen=True):
    question: str
    answer: Answer


class Kept:
    """The answers in one file.

    Args:
        path: where they are, or will be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answers: dict[str, Answer] | None = None

    @classmethod
    def of(cls, folder: Path, library: Path, properties: Mapping[str, object]) -> "Kept":
        """Return what was kept in a folder for a libcudnn and a device."""
        told = sorted((name, text) for name, text in os.environ.items() if name.startswith(_VARIABLES))
        parts = [(path.name, path.stat().st_size) for path in sorted(library.parent.glob("libcudnn*.so*"))]
        key = repr((parts, sorted(properties.items()), told)).encode()
        return cls(folder / f"{hashlib.sha256(key).hexdigest()[:16]}.jsonl")

    def get(self, question: bytes) -> Answer | None:
        """Return the answer to a question, if it was kept."""
        if self._answers is None:
            self._answers = dict(self._read())
        return self._answers.get(_key(question))

    def put(self, question: bytes, answer: Answer) -> None:
        """Keep an answer; where the file cannot be written, for this run alone."""
        if self._answers is None:
            self._answers = dict(self._read())
        self._answers[_key(question)] = answer
        line = msgspec.json.encode(_Line(_key(question), answer))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if file.tell() < MOST_BYTES:
                    file.write(b"\n" + line + b"\n")  # whoever was here before may have died in a line
        except OSError:
            return

    def _read(self) -> list[tuple[str, Answer]]:
        try:
            lines = self._path.read_bytes().split(b"\n")
        except OSError:
            return []
        found = []
        for line in filter(None, lines):
            try:
                kept = msgspec.json.decode(line, type=_Line)
            except msgspec.DecodeError:  # half a line, or not ours
                continue
            found.append((kept.question, kept.answer))
        return found


def _key(question: bytes) -> str:
    return hashlib.sha256(question).hexdigest()[:32]
