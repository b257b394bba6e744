"""The process that asks cuDNN: ``main()`` with its socket as standard input.

One JSON object a line. The first says which cuDNN and for which device; the answer is its version.
Every other is a tree of cuDNN's descriptors, as PyTorch set them:

    {"type": 4, "attributes": [[200, 8, [0]], [201, 15, [{"type": 15, "attributes": [...]}]]]}

It is made again from cuDNN's own, with the device described in place of PyTorch's handle; the answer is
the list of engine configurations that these heuristics name. None is made into a plan: that would compile
kernels.

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
"""The first version of cuDNN that takes a description of the device: 9.8."""
PATIENCE = 60
"""Seconds for one question; the process is ended by the system if cuDNN takes longer."""

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
"""The rest are enums and 32-bit integers."""
_MOST_NOTES = 32  # notes are told as bits


class RefusedError(Exception):
    """CuDNN did not take what it was given; the message is its own."""


class Cudnn:
    """A loaded libcudnn and the description of one device.

    Args:
        path: of libcudnn.so.
        before: what to load first, in this order: the libcuda.so.1 that knows of no device, so that no other
            is loaded, and what PyTorch has loaded by the time it calls cuDNN, which may not find it itself.
        properties: of the device, by the names that cuDNN knows them.

    Raises:
        RefusedError: the library cannot be loaded, is too old, or does not take the properties.
    """

    def __init__(self, path: str, before: Sequence[str], properties: Mapping[str, object]) -> None:
        try:
            for library in before:
                ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise RefusedError(str(error)) from error
        self._library.cudnnGetVersion.restype = ctypes.c_size_t
        self._library.cudnnGetErrorString.restype = ctypes.c_char_p
        self.version = int(self._library.cudnnGetVersion())
        if self.version < OLDEST:
            raise RefusedError(f"version {self.version} cannot plan without a card, 9.8 was the first")
        self._made: list[ctypes.c_void_p] = []
        self._device: ctypes.c_void_p | None = None
        text = json.dumps(properties, separators=(",", ":")).encode()
        device = self._create(DEVICEPROP)
        self._set(device, _DEVICE_JSON, _CHAR, ctypes.create_string_buffer(text), len(text))
        self._finalize(device)
        self._made.remove(device)
        self._device = device

    def configurations(self, tree: Mapping[str, Any]) -> list[tuple[int, int, int, int]]:
        """Return the engine configurations that heuristics name, in cuDNN's order.

        Returns:
            Of each: bytes of workspace, the engine's index, its numerical and its behavior notes as bits.

        Raises:
            RefusedError: cuDNN refused a part of the tree, and why.
        """
        with self._freeing():
            made = self._replay(tree)
            count = self._get(made, _HEURISTICS_RESULTS, _DESCRIPTOR, [])
            found = [self._create(ENGINECFG) for _ in range(count)]
            count = self._get(made, _HEURISTICS_RESULTS, _DESCRIPTOR, found)
            return [self._configuration(configuration) for configuration in found[:count]]

    def _configuration(self, configuration: ctypes.c_void_p) -> tuple[int, int, int, int]:
        engine = self._create(ENGINE)
        self._get(configuration, _CONFIG_ENGINE, _DESCRIPTOR, [engine])
        (workspace,) = self._numbers(configuration, _CONFIG_WORKSPACE, _INT64, 1)
        (index,) = self._numbers(engine, _ENGINE_INDEX, _INT64, 1)
        numerical = self._numbers(engine, _ENGINE_NUMERICAL, _NUMERICAL_NOTE, _MOST_NOTES)
        behavior = self._numbers(engine, _ENGINE_BEHAVIOR, _BEHAVIOR_NOTE, _MOST_NOTES)
        return workspace, index, _bits(numerical), _bits(behavior)

    def _replay(self, tree: Mapping[str, Any]) -> ctypes.c_void_p:
        """Make a descriptor and all that it is made from, and finalize them."""
        made = self._create(tree["type"])
        for name, kind, values in tree["attributes"]:
            if kind == _DESCRIPTOR:
                values = [self._replay(value).value for value in values]  # noqa: PLW2901
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

    def _get(self, of: ctypes.c_void_p, name: int, kind: int, into: Sequence[ctypes.c_void_p]) -> int:
        """Ask for descriptors, into those given; return how many there are."""
        array = (ctypes.c_void_p * len(into))(*(made.value for made in into)) if into else None
        return self._ask(of, name, kind, array, len(into))

    def _numbers(self, of: ctypes.c_void_p, name: int, kind: int, most: int) -> list[int]:
        array = (_C_TYPES.get(kind, ctypes.c_int32) * most)()
        count = self._ask(of, name, kind, array, most)
        return list(array)[:count]

    def _ask(self, of: ctypes.c_void_p, name: int, kind: int, array: object, room: int) -> int:
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
            said = message.value.decode(errors="replace")
            raise RefusedError(f"{doing}: {name} {said}".strip())

    @contextmanager
    def _freeing(self) -> Iterator[None]:
        try:
            yield
        finally:
            while self._made:
                self._library.cudnnBackendDestroyDescriptor(self._made.pop())


def _bits(notes: Sequence[int]) -> int:
    return sum({1 << note for note in notes if 0 <= note < _MOST_NOTES})


def serve(channel: socket.socket) -> None:
    """Answer questions until the other side has gone."""
    errors = os.memfd_create("stderr")
    os.dup2(errors, 2)  # cuDNN says there which functions of the driver it misses
    cudnn: Cudnn | None = None
    with channel.makefile("r", encoding="utf-8") as questions:
        for question in questions:
            asked = json.loads(question)
            answer: dict[str, object]
            signal.alarm(PATIENCE)
            try:
                if cudnn is None:
                    cudnn = Cudnn(**asked)
                    answer = {"version": cudnn.version, "process": os.getpid()}
                else:
                    answer = {"configurations": cudnn.configurations(asked)}
            except RefusedError as refused:
                answer = {"refused": str(refused)}
            signal.alarm(0)
            answer["missed"] = _missed(errors)
            channel.sendall(json.dumps(answer, separators=(",", ":")).encode() + b"\n")


def _missed(errors: int) -> list[str]:
    """Return the functions that cuDNN did not find in libcuda.so.1, and forget what it said."""
    os.lseek(errors, 0, os.SEEK_SET)
    said = os.read(errors, 1 << 20).decode(errors="replace")
    os.ftruncate(errors, 0)
    os.lseek(errors, 0, os.SEEK_SET)
    return sorted(set(re.findall(r"Could not load symbol (\w+)", said)))


def main() -> None:
    """Answer over standard input, in a process that is nobody's child.

    A script that waits for its children must not find one more.
    """
    if os.fork():
        os._exit(0)
    try:
        serve(socket.socket(fileno=sys.stdin.fileno()))
    except OSError:
        sys.exit(1)  # the other side has gone
