"""The process that queries cuDNN: ``main()``, with its socket as standard input.

One JSON object per line. The first selects the cuDNN and describes the device; the reply is cuDNN's version.
Every other line is a tree of cuDNN descriptors, as PyTorch set them:

    {"type": 4, "attributes": [[200, 8, [0]], [201, 15, [{"type": 15, "attributes": [...]}]]]}

The server recreates the tree from cuDNN's own descriptors, with the described device in place of PyTorch's
handle, and replies with the engine configurations that these heuristics return. It finalizes no execution
plan: that would compile kernels.

Source: cuDNN frontend's documentation, "Deviceless Ahead-of-time Compilation"; cudnn_graph.h 9.24.
"""

import ctypes
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

OLDEST = 90_800
"""The first version of cuDNN that accepts a description of the device: 9.8."""
QUESTION_TIMEOUT = 60
"""Seconds for one question; SIGALRM ends the process if cuDNN takes longer."""

# Descriptor types, attributes and attribute types of cudnn_graph.h.
ENGINE, ENGINECFG, ENGINEHEUR, DEVICEPROP = 2, 3, 4, 38
_HEURISTICS_RESULTS, _HEURISTICS_DEVICE = 202, 204
_CONFIG_ENGINE, _CONFIG_WORKSPACE = 300, 303
_ENGINE_INDEX, _ENGINE_NUMERICAL, _ENGINE_BEHAVIOR = 1301, 1303, 1305
_DEVICE_JSON = 2702
_INT64, _FLOAT, _DOUBLE, _DESCRIPTOR, _CHAR = 3, 4, 5, 15, 24
_NUMERICAL_NOTE, _BEHAVIOR_NOTE = 11, 19
_C_TYPES: Mapping[int, type[Any]] = {
    2: ctypes.c_bool,
    _INT64: ctypes.c_int64,
    _FLOAT: ctypes.c_float,
    _DOUBLE: ctypes.c_double,
    _DESCRIPTOR: ctypes.c_void_p,
    _CHAR: ctypes.c_char,
}
"""Attribute type -> C type; the others are enums and 32-bit integers."""
_MAX_NOTES = 32  # notes are returned as bits


class CudnnRefusedError(Exception):
    """CuDNN refused the library, the device or a descriptor; the message is cuDNN's own."""


def dotted_version(version: int) -> str:
    """Return a version as people write it.

    >>> dotted_version(90_701), dotted_version(8_907)
    ('9.7.1', '8.9.7')
    """
    major, rest = divmod(version, 10_000 if version >= 90_000 else 1_000)  # noqa: PLR2004 - as in cudnn_version.h
    return f"{major}.{rest // 100}.{rest % 100}"


class Cudnn:
    """A loaded libcudnn and the description of one device.

    Args:
        path: libcudnn.so.
        before: the libraries to load first, in this order: the libcuda.so.1 that reports no device, so that
            no other is loaded, and those that PyTorch has loaded by the time it calls cuDNN, which may not
            find them itself.
        properties: the device's, by cuDNN's names.

    Raises:
        CudnnRefusedError: the library cannot be loaded, is too old, or rejects the properties.
    """

    def __init__(self, path: str, before: Sequence[str], properties: Mapping[str, object]) -> None:
        try:
            for library in before:
                ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise CudnnRefusedError(str(error)) from error
        self._library.cudnnGetVersion.restype = ctypes.c_size_t
        self._library.cudnnGetErrorString.restype = ctypes.c_char_p
        self.version = int(self._library.cudnnGetVersion())
        if self.version < OLDEST:
            raise CudnnRefusedError(
                f"cuDNN {dotted_version(self.version)} is too old to be queried without a GPU "
                "(this needs 9.8 or later)"
            )
        self._made: list[ctypes.c_void_p] = []
        self._device: ctypes.c_void_p | None = None
        text = json.dumps(properties, separators=(",", ":")).encode()
        device = self._create(DEVICEPROP)
        self._set(device, _DEVICE_JSON, _CHAR, ctypes.create_string_buffer(text), len(text))
        self._finalize(device)
        self._made.remove(device)
        self._device = device

    def configurations(self, tree: Mapping[str, Any]) -> list[tuple[int, int, int, int]]:
        """Return the engine configurations that cuDNN's heuristics return, in cuDNN's order.

        Returns:
            For each: bytes of workspace, the engine's index, its numerical and its behavior notes as bits.

        Raises:
            CudnnRefusedError: cuDNN refused a part of the tree; the message gives the reason.
        """
        with self._destroying_descriptors():
            made = self._recreate(tree)
            count = self._read_descriptors(made, _HEURISTICS_RESULTS, _DESCRIPTOR, [])
            found = [self._create(ENGINECFG) for _ in range(count)]
            count = self._read_descriptors(made, _HEURISTICS_RESULTS, _DESCRIPTOR, found)
            return [self._configuration(configuration) for configuration in found[:count]]

    def _configuration(self, configuration: ctypes.c_void_p) -> tuple[int, int, int, int]:
        engine = self._create(ENGINE)
        self._read_descriptors(configuration, _CONFIG_ENGINE, _DESCRIPTOR, [engine])
        (workspace,) = self._read_numbers(configuration, _CONFIG_WORKSPACE, _INT64, 1)
        (index,) = self._read_numbers(engine, _ENGINE_INDEX, _INT64, 1)
        numerical = self._read_numbers(engine, _ENGINE_NUMERICAL, _NUMERICAL_NOTE, _MAX_NOTES)
        behavior = self._read_numbers(engine, _ENGINE_BEHAVIOR, _BEHAVIOR_NOTE, _MAX_NOTES)
        return workspace, index, _bits(numerical), _bits(behavior)

    def _recreate(self, tree: Mapping[str, Any]) -> ctypes.c_void_p:
        """Create and finalize a descriptor, after the descriptors it refers to."""
        made = self._create(tree["type"])
        for name, kind, values in tree["attributes"]:
            if kind == _DESCRIPTOR:
                values = [self._recreate(value).value for value in values]  # noqa: PLW2901
            array = (_C_TYPES.get(kind, ctypes.c_int32) * len(values))(*values)
            self._set(made, name, kind, array, len(values))
        if tree["type"] == ENGINEHEUR:
            self._set(made, _HEURISTICS_DEVICE, _DESCRIPTOR, (ctypes.c_void_p * 1)(self._device), 1)
        self._finalize(made)
        return made

    def _create(self, kind: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._check(self._library.cudnnBackendCreateDescriptor(kind, ctypes.byref(made)), f"create {kind}")
        self._made.append(made)
        return made

    def _set(self, to: ctypes.c_void_p, name: int, kind: int, values: object, count: int) -> None:
        status = self._library.cudnnBackendSetAttribute(to, name, kind, ctypes.c_int64(count), values)
        self._check(status, f"set {name}")

    def _finalize(self, made: ctypes.c_void_p) -> None:
        self._check(self._library.cudnnBackendFinalize(made), "finalize")

    def _read_descriptors(
        self, of: ctypes.c_void_p, name: int, kind: int, into: Sequence[ctypes.c_void_p]
    ) -> int:
        """Read descriptors into ``into``; return how many there are."""
        array = (ctypes.c_void_p * len(into))(*(made.value for made in into)) if into else None
        return self._get_attribute(of, name, kind, array, len(into))

    def _read_numbers(self, of: ctypes.c_void_p, name: int, kind: int, limit: int) -> list[int]:
        array = (_C_TYPES.get(kind, ctypes.c_int32) * limit)()
        count = self._get_attribute(of, name, kind, array, limit)
        return list(array)[:count]

    def _get_attribute(self, of: ctypes.c_void_p, name: int, kind: int, array: object, room: int) -> int:
        count = ctypes.c_int64()
        status = self._library.cudnnBackendGetAttribute(
            of, name, kind, ctypes.c_int64(room), ctypes.byref(count), array
        )
        self._check(status, f"get {name}")
        return count.value

    def _check(self, status: int, doing: str) -> None:
        if status:
            message = ctypes.create_string_buffer(1024)
            self._library.cudnnGetLastErrorString(message, ctypes.c_size_t(len(message)))
            name = self._library.cudnnGetErrorString(status).decode()
            detail = message.value.decode(errors="replace")
            raise CudnnRefusedError(f"{doing}: {name} {detail}".strip())

    @contextmanager
    def _destroying_descriptors(self) -> Iterator[None]:
        try:
            yield
        finally:
            while self._made:
                self._library.cudnnBackendDestroyDescriptor(self._made.pop())


def _bits(notes: Sequence[int]) -> int:
    return sum({1 << note for note in notes if 0 <= note < _MAX_NOTES})


def serve(channel: socket.socket) -> None:
    """Answer questions until the client disconnects."""
    errors = os.memfd_create("stderr")
    os.dup2(errors, 2)  # cuDNN reports there which driver functions it misses
    cudnn: Cudnn | None = None
    with channel.makefile("r", encoding="utf-8") as questions:
        for question in questions:
            request = json.loads(question)
            answer: dict[str, object]
            signal.alarm(QUESTION_TIMEOUT)
            try:
                if cudnn is None:
                    cudnn = Cudnn(**request)
                    answer = {"version": cudnn.version, "process": os.getpid()}
                else:
                    answer = {"configurations": cudnn.configurations(request)}
            except CudnnRefusedError as refused:
                answer = {"refused": str(refused)}
            signal.alarm(0)
            answer["missed"] = _missed(errors)
            channel.sendall(json.dumps(answer, separators=(",", ":")).encode() + b"\n")


def _missed(errors: int) -> list[str]:
    """Return the functions that cuDNN did not find in libcuda.so.1, and truncate its output."""
    os.lseek(errors, 0, os.SEEK_SET)
    output = os.read(errors, 1 << 20).decode(errors="replace")
    os.ftruncate(errors, 0)
    os.lseek(errors, 0, os.SEEK_SET)
    return sorted(set(re.findall(r"Could not load symbol (\w+)", output)))


def main() -> None:
    """Serve on standard input, in a process detached from its parent.

    A script that waits for its children must not find an extra one.
    """
    if os.fork():
        os._exit(0)
    try:
        serve(socket.socket(fileno=sys.stdin.fileno()))
    except OSError:
        sys.exit(1)  # the client has disconnected
