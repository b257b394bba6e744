"""How fragmentation is printed: rows add up, names are escaped, and the JSON follows its schema."""

import io
import json
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from memfit.records import (
    Breakdown,
    Explanation,
    Fragmentation,
    GroupBy,
    Hole,
    Phase,
    PinningBlock,
    Provenance,
    ReservedBytes,
    ReservedMemoryUse,
    ScriptLocation,
)
from memfit.report.escape_control_characters import escaped
from memfit.report.public_json import public_json_type, public_json_value, result_to_json
from memfit.report.terminal.explanation import print_fragmentation

MIB = 1 << 20
BORN = ScriptLocation(1, Phase.BACKWARD, "layers.3", "MmBackward0", "/somewhere/train.py:12")
FREED = ScriptLocation(2, Phase.OPTIMIZER, "", "", "/somewhere/train.py:20")
PIN = PinningBlock(4 * MIB, 3 * MIB, "gradient", "active_allocated", BORN, FREED)
HOLE = Hole(7 * MIB, 13 * MIB, "large", 2 * MIB, 20 * MIB, False, 2, 7 * MIB, (PIN,))
SMALL = ReservedBytes(requested=MIB, holes=MIB)
LARGE = ReservedBytes(
    requested=6 * MIB,
    rounding=2 * MIB,
    unsplit=3 * MIB,
    awaiting_free=4 * MIB,
    holes=13 * MIB,
    cached=20 * MIB,
)
MOMENT = ReservedMemoryUse("peak reserved", 7, BORN, SMALL + LARGE, SMALL, LARGE, (HOLE,))
CACHED = ReservedBytes(cached=5 * MIB)
END = replace(MOMENT, name="the end", all=CACHED, small=CACHED, large=ReservedBytes())
FOUND = Fragmentation(Provenance.EXACT, "", (MOMENT, END))


def explanation_with(answer, found):
    """Return an explanation with this fragmentation."""
    held = Breakdown(0, BORN, 0, dict.fromkeys(GroupBy, ()), ())
    return Explanation(answer, (), "peak", held, (), found)


def printed(found, width=200):
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    print_fragmentation(found, console)
    return console.file.getvalue()


def test_the_table_splits_reserved_bytes_by_use():
    rows = [line.split() for line in printed(FOUND).splitlines()]
    assert ["requested", "7.00", "0.00"] in rows
    assert ["──", "allocated", "12.00", "0.00"] in rows
    assert ["awaiting", "other", "streams", "4.00", "0.00"] in rows
    assert ["holes", "in", "used", "segments", "14.00", "0.00"] in rows
    assert ["segments", "wholly", "free", "20.00", "5.00"] in rows
    assert ["──", "reserved", "50.00", "5.00"] in rows
    assert ["not", "requested", "86.0", "%", "100.0", "%"] in rows
    assert ["in", "the", "small", "pool", "50.0", "%", "100.0", "%"] in rows
    assert ["in", "the", "large", "pool", "87.5", "%", "-"] in rows
    assert not any(row[-2:] == ["0.00", "0.00"] for row in rows)


def test_a_hole_is_printed_once_with_its_moments_and_pinning_blocks():
    text = printed(FOUND)
    assert (
        text.count("13.0 MiB in a large segment of 20.0 MiB at 0x200000, kept in use by 2 blocks (7.0 MiB)")
        == 1
    )
    assert "(peak reserved, the end)" in text
    where = "step 1 · backward · layers.3 · MmBackward0 · /somewhere/train.py:12"
    assert f"before   3.0 MiB  gradient · {where}; freed in step 2 · optimizer" in text


def test_at_most_three_holes_of_a_moment_are_printed():
    holes = tuple(replace(HOLE, size=size * MIB) for size in (9, 8, 7, 6, 5))
    lines = printed(replace(FOUND, moments=(replace(MOMENT, holes=holes),))).splitlines()
    assert [line.split()[0] for line in lines if " in a large segment" in line] == ["9.0", "8.0", "7.0"]


@pytest.mark.parametrize(
    ("pin", "shown"),
    [
        (replace(PIN, freed=None), "; held to the end"),
        (replace(PIN, born=None), "allocated before the allocator history; freed in step 2"),
        (replace(PIN, state="active_awaiting_free"), "; freed, but another stream still uses it"),
        (replace(PIN, address=20 * MIB), "after    3.0 MiB"),
    ],
)
def test_the_lifetime_of_a_pinning_block_is_printed(pin, shown):
    holes = (replace(HOLE, pins=(pin,)),)
    assert shown in printed(replace(FOUND, moments=(replace(MOMENT, holes=holes),)))


def test_the_table_fits_a_terminal_of_80_columns():
    moments = tuple(
        replace(MOMENT, name=name, all=ReservedBytes(requested=80_000_000 * MIB // 1000))
        for name in ("peak reserved", "peak allocated", "the end")
    )
    text = printed(replace(FOUND, moments=moments), 80)
    assert "…" not in text
    assert "── reserved" in text


def test_expandable_segments_get_a_remark_on_empty_cache():
    mapped = replace(FOUND, moments=(replace(MOMENT, holes=(replace(HOLE, expandable=True),)),))
    assert "empty_cache releases only whole handles within a hole" in printed(mapped)
    assert "handles" not in printed(FOUND)


def test_the_reason_is_printed_if_fragmentation_is_not_available():
    found = Fragmentation(Provenance.EXACT, "CUDA's own pool.", ())
    assert printed(found).strip() == "Fragmentation: not available. CUDA's own pool."


@pytest.mark.parametrize(
    "name", ["layer\x1b[31m", "a\rb\x07", "\u202egpj.exe", "\x9b2J", "\ud800", "[bold]x[/]"]
)
def test_names_from_a_trace_are_escaped(answer, name):
    place = ScriptLocation(1, Phase.FORWARD, name, name, f"{name}:1")
    pin = replace(PIN, born=place, freed=place)
    hostile = replace(FOUND, moments=(replace(MOMENT, place=place, holes=(replace(HOLE, pins=(pin,)),)),))
    text = printed(hostile, 400)
    assert text.count(escaped(name)) == 4  # as a module twice, as an op, in a path
    assert not any(character in text for character in "\x1b\r\x07\u202e\x9b\ud800")
    pins = json.loads(result_to_json(explanation_with(answer, hostile)))["fragmentation"]["moments"][0][
        "holes"
    ][0]["pins"]
    assert pins[0]["freed"]["module"] == name


def test_the_json_decodes_to_the_public_schema(answer):
    decoded = msgspec.json.decode(
        result_to_json(explanation_with(answer, FOUND)), type=public_json_type(Explanation)
    )
    for name, value in public_json_value(answer).items():
        assert json.loads(msgspec.json.encode(getattr(decoded, name))) == value
    first, end = decoded.fragmentation.moments
    assert (first.all.allocated, first.all.reserved) == (12 * MIB, 50 * MIB)
    assert (first.small.holes, first.large.unsplit, first.all.awaiting_free) == (MIB, 3 * MIB, 4 * MIB)
    assert end.small.cached == 5 * MIB
    (pin,) = first.holes[0].pins
    assert (pin.category, pin.state, pin.born.line) == ("gradient", "active_allocated", BORN.line)
    assert decoded.fragmentation.provenance == "exact"
