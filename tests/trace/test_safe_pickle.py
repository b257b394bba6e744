"""The unpickler of plain data: what it reads, and everything it must refuse."""

import os
import pickle
import pickletools
import struct
from collections import OrderedDict
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.trace import safe_pickle
from memfit.trace.safe_pickle import NotPlainDataError, load_plain_pickle

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(1 << 31), 1 << 31), inner)
    ),
    max_leaves=30,
)


# Protocol 2 has no opcode for bytes: it constructs them with a function.
@given(plain, st.integers(3, pickle.HIGHEST_PROTOCOL))
def test_plain_data_round_trips(data, protocol):
    assert load_plain_pickle(pickle.dumps(data, protocol)) == data


def test_shared_objects_stay_shared():
    frames = [{"name": "f"}]
    first, second = load_plain_pickle(pickle.dumps([frames, frames]))
    assert first is second


def test_a_list_that_contains_itself_round_trips():
    knot = []
    knot.append(knot)
    assert (found := load_plain_pickle(pickle.dumps(knot)))[0] is found


def test_large_strings_and_many_items_round_trip():
    data = {"x" * 300: ["y" * 70_000, list(range(3000)), {i: str(i) for i in range(3000)}]}
    assert load_plain_pickle(pickle.dumps(data)) == data


class Command:
    def __reduce__(self):
        return os.system, ("true",)


REFUSED = {
    "a function": (pickle.dumps(Command(), 4), "system"),
    "a function, early protocol": (pickle.dumps(Command(), 2), "posix.system"),
    "a class": (pickle.dumps(OrderedDict(a=1)), "collections.OrderedDict"),
    "a set": (pickle.dumps({1, 2}), "opcode"),
    "a bytearray": (pickle.dumps(bytearray(b"x"), 5), "opcode"),
    "protocol 0": (pickle.dumps([1], 0), "not a pickle"),
    "an instance": (b"\x80\x02(ios\nsystem\n.", "INST"),
    "a call": (b"\x80\x02NNR.", "REDUCE"),
    "a built object": (b"\x80\x02}}b.", "BUILD"),
    "an object by number": (b"\x80\x02\x82\x01.", "EXT1"),
    "a persistent object": (b"\x80\x02NQ.", "BINPERSID"),
    "a named persistent object": (b"\x80\x02Pid\n.", "PERSID"),
    "not a pickle": (b"PK\x03\x04", "not a pickle"),
    "nothing": (b"", "not a pickle"),
    "no value": (b"\x80\x04.", "truncated"),
    "an append to a number": (b"\x80\x04K\x01K\x02a.", "damaged"),
    "an item set on a list": (b"\x80\x04](K\x01K\x02u.", "damaged"),
    "half an item": (b"\x80\x04}(K\x01u.", "damaged"),
    "a key that is a tuple": (b"\x80\x04})K\x01s.", "damaged"),
    "a mark too few": (b"\x80\x04]K\x01e.", "truncated"),
    "a tuple of too few": (b"\x80\x04K\x01\x87.", "truncated"),
    "text that is not UTF-8": (b"\x80\x04\x8c\x01\xff.", "damaged"),
    "a memo entry that was never set": (b"\x80\x04h\x05.", "truncated"),
    "a memo index far out of range": (b"\x80\x04Nr\xff\xff\xff\xff.", "damaged"),
    "a string of 2**63 bytes": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 63) + b"x.", "truncated"),
    "bytes of 2**40": (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.", "truncated"),
    "a number of 2**20 bytes": (
        b"\x80\x04\x8b" + struct.pack("<I", 1 << 20) + b"x" * (1 << 20) + b".",
        "damaged",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_damage_and_code_are_refused(name):
    data, words = REFUSED[name]
    with pytest.raises(NotPlainDataError) as caught:
        load_plain_pickle(data)
    assert words in str(caught.value)


def test_nothing_in_the_pickle_is_executed(monkeypatch):
    data, ran = pickle.dumps(Command()), []
    monkeypatch.setattr("posix.system", ran.append)
    pickle.loads(data)  # noqa: S301  Python's own unpickler does run it
    assert ran == ["true"]
    with pytest.raises(NotPlainDataError):
        load_plain_pickle(data)
    assert ran == ["true"]


def test_a_million_nested_lists_are_read():
    data = b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b"."
    assert len(load_plain_pickle(data)) == 1


def test_a_million_nested_tuples_are_refused_as_a_key():
    data = b"\x80\x04}" + b")" + b"\x85" * 1_000_000 + b"Ns."
    with pytest.raises(NotPlainDataError, match="damaged"):
        load_plain_pickle(data)


def test_operations_are_limited(monkeypatch):
    monkeypatch.setattr(safe_pickle, "MAX_OPERATIONS", 100)
    with pytest.raises(NotPlainDataError, match="more than 100 operations"):
        load_plain_pickle(b"\x80\x04" + b"N" * 200 + b".")


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_read(data):
    with suppress(NotPlainDataError):
        load_plain_pickle(b"\x80\x04" + data)


@given(plain, st.data())
def test_a_damaged_pickle_is_refused_or_read(value, draw):
    data = bytearray(pickle.dumps(value))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    with suppress(NotPlainDataError):
        load_plain_pickle(bytes(data[: draw.draw(st.integers(0, len(data)))]))


class Point:
    def __init__(self):
        self.x = 1


def test_objects_are_described_and_not_constructed():
    point, call, kind = load_plain_pickle(pickle.dumps([Point(), Command(), Point], 4), objects=True)
    assert (point.name.split(".")[-1], point.arguments, point.state) == ("Point", (), {"x": 1})
    assert (call.name, call.arguments) == ("posix.system", ("true",))
    assert (kind.name.split(".")[-1], kind.arguments) == ("Point", None)


@given(st.binary(max_size=200))
def test_random_bytes_that_may_have_objects_are_refused_or_read(data):
    with suppress(NotPlainDataError):
        load_plain_pickle(b"\x80\x04" + data, objects=True)


def test_every_opcode_exists_in_pickletools():
    known = {ord(op.code.encode("latin-1")) for op in pickletools.opcodes}
    assert set(safe_pickle._OPERATIONS) | set(safe_pickle._DESCRIBED) | set(safe_pickle._CALLS) <= known
