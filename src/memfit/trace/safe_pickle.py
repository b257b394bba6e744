"""Read a pickle of plain data without executing anything.

A pickle is a program for a small stack machine, and Python's own unpickler can be made to call any function.
This one only builds dicts, lists, tuples, strings, bytes, numbers, True, False and None: nothing here can
reach a class or a function. An object is refused or, if the reader asks for it, described:
``UnconstructedObject``.

Source: the opcodes are those of the standard library's ``pickletools``, protocols 2 to 5.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_OPERATIONS = 1 << 26
"""One operation makes at most one object; a snapshot of two million events needs fewer."""


class NotPlainDataError(ValueError):
    """The pickle is damaged or is not plain data; the message completes ``it ...``."""


@dataclass(slots=True, eq=False)
class UnconstructedObject:
    """What a pickle says about an object, which is not constructed."""

    name: str
    """Of the class or function, with its module."""
    arguments: tuple[Any, ...] | None = None
    """With which the pickle would call it; None for the class or function itself."""
    state: Any = None
    """What the pickle would give to ``__setstate__`` or ``__dict__``."""


def load_plain_pickle(data: bytes, *, objects: bool = False) -> object:
    """Decode a pickle.

    Args:
        data: the whole pickle, protocol 2 to 5; bytes after its end are ignored, as pickle does.
        objects: whether to describe objects instead of refusing them, for pickles of protocol 4 or 5.

    Returns:
        Plain data; with ``objects``, an ``UnconstructedObject`` for each object. What the pickle shares
        is shared in the result.

    Raises:
        NotPlainDataError: it refers to a class or a function, is truncated, is not a pickle, or is too large.

    >>> import pickle
    >>> load_plain_pickle(pickle.dumps({"sizes": [1, 2.5, None]}))
    {'sizes': [1, 2.5, None]}
    """
    if not data.startswith(_PROTO):
        raise NotPlainDataError("is not a pickle of protocol 2 or later")
    decoder = _Decoder(data)
    operations = _OPERATIONS | _DESCRIBED if objects else _OPERATIONS
    try:
        for _ in range(MAX_OPERATIONS):
            code = data[decoder.position]
            decoder.position += 1
            if code == _STOP:
                return decoder.stack.pop()
            operations[code](decoder)
    except KeyError:
        raise NotPlainDataError(_refusal(decoder, data[decoder.position - 1])) from None
    except (IndexError, struct.error):
        raise NotPlainDataError("is truncated or damaged") from None
    except (UnicodeDecodeError, TypeError, AttributeError):
        raise NotPlainDataError(f"is damaged near byte {decoder.position:,}") from None
    raise NotPlainDataError(f"takes more than {MAX_OPERATIONS:,} operations to decode")


class _Decoder:
    """The stack, the stacks set aside by marks, and the memo."""

    __slots__ = ("data", "memo", "outer", "position", "stack")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: list[Any] = []

    def take(self, size: int) -> bytes:
        """Read the next bytes of the pickle."""
        piece = self.data[self.position : self.position + size]
        if len(piece) != size:
            raise IndexError
        self.position += size
        return piece

    def number(self, form: struct.Struct) -> Any:
        """Read one number."""
        (value,) = form.unpack_from(self.data, self.position)
        self.position += form.size
        return value

    def pop_to_mark(self) -> list[Any]:
        """Take everything above the last mark."""
        above, self.stack = self.stack, self.outer.pop()
        return above


_Operation = Callable[[_Decoder], None]
_KEYS = {str, int, UnconstructedObject}  # whose hash is its identity
_U8, _U16, _U32, _U64 = map(struct.Struct, ("<B", "<H", "<I", "<Q"))
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")
_LONGEST_INTEGER = 9  # bytes: an unsigned 64-bit number and its sign
_PROTO, _STOP = b"\x80", ord(".")


def _ignore(form: struct.Struct) -> _Operation:
    """Skip a number that only frames the file."""

    def skip(decoder: _Decoder) -> None:
        decoder.number(form)

    return skip


def _push(make: Callable[[], object]) -> _Operation:
    def push(decoder: _Decoder) -> None:
        decoder.stack.append(make())

    return push


def _push_number(form: struct.Struct) -> _Operation:
    def push(decoder: _Decoder) -> None:
        decoder.stack.append(decoder.number(form))

    return push


def _push_bytes(length: struct.Struct, decode: Callable[[bytes], object]) -> _Operation:
    def push(decoder: _Decoder) -> None:
        decoder.stack.append(decode(decoder.take(decoder.number(length))))

    return push


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")  # as pickle writes file names that are not UTF-8


def _integer(data: bytes) -> int:
    if len(data) > _LONGEST_INTEGER:
        raise TypeError
    return int.from_bytes(data, "little", signed=True)


def _push_tuple(size: int) -> _Operation:
    def push(decoder: _Decoder) -> None:
        stack = decoder.stack
        if len(stack) < size:
            raise IndexError
        stack[-size:] = [tuple(stack[-size:])]

    return push


def _tuple(decoder: _Decoder) -> None:
    items = decoder.pop_to_mark()
    decoder.stack.append(tuple(items))


def _mark(decoder: _Decoder) -> None:
    decoder.outer.append(decoder.stack)
    decoder.stack = []


def _append(decoder: _Decoder) -> None:
    item = decoder.stack.pop()
    _list(decoder).append(item)


def _appends(decoder: _Decoder) -> None:
    items = decoder.pop_to_mark()
    _list(decoder).extend(items)


def _set_item(decoder: _Decoder) -> None:
    value, key = decoder.stack.pop(), decoder.stack.pop()
    _dict_items(decoder, [key], [value])


def _set_items(decoder: _Decoder) -> None:
    items = decoder.pop_to_mark()
    _dict_items(decoder, items[::2], items[1::2])


def _list(decoder: _Decoder) -> list[Any]:
    container = decoder.stack[-1]
    if type(container) is not list:
        raise TypeError
    return container


def _dict_items(decoder: _Decoder, keys: list[Any], values: list[Any]) -> None:
    container = decoder.stack[-1]
    # Only keys with a flat hash: hashing a tuple nested a million deep would overflow the stack.
    if type(container) is not dict or len(keys) != len(values) or not {*map(type, keys)} <= _KEYS:
        raise TypeError
    container.update(zip(keys, values, strict=True))


def _memoize(decoder: _Decoder) -> None:
    decoder.memo.append(decoder.stack[-1])


def _put(form: struct.Struct) -> _Operation:
    def put(decoder: _Decoder) -> None:
        # Pickle counts up. Python's own memo would grow as large as any index in the file.
        if decoder.number(form) != len(decoder.memo):
            raise TypeError
        _memoize(decoder)

    return put


def _get(form: struct.Struct) -> _Operation:
    unpack, size = form.unpack_from, form.size

    def get(decoder: _Decoder) -> None:  # the most frequent operation: every string that a snapshot repeats
        (index,) = unpack(decoder.data, decoder.position)
        decoder.position += size
        decoder.stack.append(decoder.memo[index])

    return get


_OPERATIONS: dict[int, _Operation] = {
    0x80: _ignore(_U8),  # PROTO
    0x95: _ignore(_U64),  # FRAME
    ord("("): _mark,
    ord("N"): _push(lambda: None),
    0x88: _push(lambda: True),
    0x89: _push(lambda: False),
    ord("J"): _push_number(_I32),  # BININT
    ord("K"): _push_number(_U8),  # BININT1
    ord("M"): _push_number(_U16),  # BININT2
    ord("G"): _push_number(_F64),  # BINFLOAT
    0x8A: _push_bytes(_U8, _integer),  # LONG1
    0x8B: _push_bytes(_U32, _integer),  # LONG4
    0x8C: _push_bytes(_U8, _text),  # SHORT_BINUNICODE
    ord("X"): _push_bytes(_U32, _text),  # BINUNICODE
    0x8D: _push_bytes(_U64, _text),  # BINUNICODE8
    ord("C"): _push_bytes(_U8, bytes),  # SHORT_BINBYTES
    ord("B"): _push_bytes(_U32, bytes),  # BINBYTES
    0x8E: _push_bytes(_U64, bytes),  # BINBYTES8
    ord(")"): _push(tuple),  # EMPTY_TUPLE
    ord("]"): _push(list),  # EMPTY_LIST
    ord("}"): _push(dict),  # EMPTY_DICT
    0x85: _push_tuple(1),
    0x86: _push_tuple(2),
    0x87: _push_tuple(3),
    ord("t"): _tuple,
    ord("a"): _append,
    ord("e"): _appends,
    ord("s"): _set_item,
    ord("u"): _set_items,
    0x94: _memoize,
    ord("q"): _put(_U8),  # BINPUT
    ord("r"): _put(_U32),  # LONG_BINPUT
    ord("h"): _get(_U8),  # BINGET
    ord("j"): _get(_U32),  # LONG_BINGET
}


def _describe_global(decoder: _Decoder) -> None:
    name, module = decoder.stack.pop(), decoder.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise TypeError
    decoder.stack.append(UnconstructedObject(f"{module}.{name}"))


def _describe_call(decoder: _Decoder) -> None:
    arguments, called = decoder.stack.pop(), decoder.stack.pop()
    if (
        type(arguments) is not tuple
        or type(called) is not UnconstructedObject
        or called.arguments is not None
    ):
        raise TypeError
    decoder.stack.append(UnconstructedObject(called.name, arguments))


def _describe_state(decoder: _Decoder) -> None:
    state, built = decoder.stack.pop(), decoder.stack[-1]
    if type(built) is not UnconstructedObject:
        raise TypeError
    built.state = state


_DESCRIBED: dict[int, _Operation] = {
    0x93: _describe_global,  # STACK_GLOBAL
    ord("R"): _describe_call,  # REDUCE
    0x81: _describe_call,  # NEWOBJ
    ord("b"): _describe_state,  # BUILD
}

_CALLS = {
    ord("i"): "INST", ord("o"): "OBJ", ord("R"): "REDUCE", ord("b"): "BUILD", ord("P"): "PERSID",
    ord("Q"): "BINPERSID", 0x81: "NEWOBJ", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", 0x92: "NEWOBJ_EX",
}  # fmt: skip
_GLOBAL, _STACK_GLOBAL = ord("c"), 0x93
_NAME = 200  # most characters shown of a name


def _refusal(decoder: _Decoder, code: int) -> str:
    """Return why the opcode is refused."""
    if code == _GLOBAL:
        lines = decoder.data[decoder.position :][:_NAME].split(b"\n")[:2]
        names = [line.decode("utf-8", "replace") for line in lines]
    elif code == _STACK_GLOBAL:
        names = [name for name in decoder.stack[-2:] if isinstance(name, str)]
    elif code in _CALLS:
        return f"constructs an object ({_CALLS[code]}), which runs code"
    else:
        return f"contains the opcode {bytes((code,))!r}, which plain data never needs"
    return f"refers to {'.'.join(names)[:_NAME]!r}, which is code"
