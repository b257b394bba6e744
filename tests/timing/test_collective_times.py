"""Seconds of collectives, the timeline that they are part of, and what a step's time says of them."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.devices import find_device
from memfit.records import EventLabel, HostUnits, Operand, Operation, Phase, WholeStep
from memfit.timing.collective_times import has_nvlink, why_time_is_unknown
from memfit.timing.kernel_times import LONG, Basis, KernelTimes, find_coefficients, kernel_table
from memfit.timing.kernel_work import work_of
from memfit.timing.step_time import step_time
from memfit.timing.step_timeline import QueuedWork, step_timeline

LABELS = (EventLabel(Phase.BACKWARD, "", "", -1),)


def operation(name, elements=0, dtype="float16", **fields):
    both = (Operand((elements,), dtype),)
    base = name, -1, -1, (), (), (), fields.pop("flops", 0), 0, dtype, False, 0.0, 0
    return Operation(*base, **{"operands": both, "results": both, "launches": 1} | fields)


def collective(name, elements, ranks=8, **fields):
    """Return one of so many elements of 2 bytes on the larger side, on a stream of its own."""
    return operation(f"nccl.{name}", elements, **{"ranks": ranks, "stream": 1} | fields)


PUBLISHED = [  # card, collective, ranks, elements, milliseconds: aiconfigurator's tables
    ("H100-80GB", "all_reduce", 8, 4194304, 0.079),
    ("H100-80GB", "all_reduce", 8, 67108864, 0.579),
    ("H100-80GB", "all_gather", 8, 67108864, 0.393),
    ("H100-80GB", "reduce_scatter", 4, 268435456, 1.300),
    ("A100-80GB", "all_reduce", 8, 16777216, 0.367),
    ("A100-80GB", "all_gather", 2, 1024, 0.009),
    ("B200", "all_gather", 8, 268435456, 0.761),
    ("B200", "all_to_all", 4, 67108864, 0.231),
    ("L40S", "all_reduce", 2, 67108864, 6.720),
]


def test_published_collectives_are_within_a_quarter_and_half_much_closer():
    off = []
    for card, name, ranks, elements, milliseconds in PUBLISHED:
        one = collective(name, elements, ranks)
        time = KernelTimes(find_device(card)).of(one)
        stated = kernel_table()["kind"][work_of(one).kind]["card"][card]
        assert time.basis is Basis.CARD
        assert time.spread == stated["long" if time.seconds > LONG else "spread"]
        off.append(abs(math.log(time.seconds * 1e3 / milliseconds)))
    assert max(off) < 0.25
    assert sorted(off)[len(off) // 2] < 0.12


@given(
    st.sampled_from(["A100-80GB", "H100 PCIe", "B200", "L40S", "RTX 4090"]),
    st.sampled_from(["all_reduce", "all_gather", "broadcast", "all_to_all"]),
    st.sampled_from([2, 3, 4, 8, 16]),
    st.tuples(*[st.integers(0, 1 << 30)] * 2),
)
def test_more_bytes_take_more_time(card, name, ranks, sizes):
    times = KernelTimes(find_device(card))
    less, more = (times.of(collective(name, size, ranks)).seconds for size in sorted(sizes))
    assert 0 < less <= more


def test_bytes_over_a_link_depend_on_the_algorithm():
    moved = {name: work_of(collective(name, 800)).traffic for name in ("all_reduce", "all_gather", "reduce")}
    assert moved == {"all_reduce": 2 * 1600 * 7 / 8, "all_gather": 1600 * 7 / 8, "reduce": 1600}
    assert work_of(collective("all_reduce", 800, 2)).traffic == 1600


def test_a_card_without_tables_has_those_of_one_with_the_same_sort_of_link():
    assert has_nvlink(find_device("V100"))
    assert not has_nvlink(find_device("RTX 4090"))
    for name, relative in (("V100-32GB", "A100-80GB"), ("RTX 4090", "L40S"), ("H100 PCIe", "L40S")):
        found = find_coefficients("all_reduce", find_device(name))
        table = kernel_table()["kind"]["all_reduce"]
        machine = 1.0 if relative == "A100-80GB" else table["shared"]["bandwidth_8"]
        its = table["card"][relative]
        assert found.values == {**its, "bandwidth_8": its["bandwidth_8"] * machine}
        assert found.basis is Basis.RELATIVE
    known = find_coefficients("all_reduce", find_device("V100"))
    assert find_coefficients("all_reduce", find_device("RTX 4090")).spread > known.spread


def test_streams_overlap_except_where_one_waits_for_another():
    kernel = QueuedWork(issue=0.0, seconds=2.0)
    shared = QueuedWork(issue=0.0, seconds=3.0, stream=1, after=(0,))
    assert step_timeline([kernel, shared, kernel, kernel]).seconds == 6.0  # within the kernels' time
    timeline = step_timeline([kernel, shared, kernel, replace(kernel, after=(1,))])
    assert timeline.seconds == 7.0
    assert timeline.starts == (0.0, 2.0, 2.0, 5.0)
    assert timeline.busy == {0: 6.0, 1: 3.0}


def test_the_host_waits_for_its_stream_alone():
    shared = QueuedWork(issue=0.0, seconds=2.5, stream=1)
    read = QueuedWork(issue=1.0, seconds=1.0, waits=True)
    assert step_timeline([shared, read, read]).starts == (0.0, 1.0, 3.0)


def ddp_step(bucket=1 << 26, *, waits=True):
    """Return a backward of four products and an all-reduce, for which the last product waits or not."""
    size = 8192
    square = Operand((size, size), "bfloat16")
    product = operation(
        "aten.mm.default", operands=(square, square), results=(square,), dtype="bfloat16", flops=2 * size**3
    )
    order, after = (0, 1, 0, 0, 0), ((1, 0), *(((4, 1),) if waits else ()))
    return WholeStep((product, collective("all_reduce", bucket)), order, (0,) * 5, HostUnits(), after=after)


def test_the_time_of_a_step_says_what_collectives_take_and_for_how_much_of_it_the_step_waits():
    hidden, waited = (step_time(ddp_step(size), LABELS, find_device("H100")) for size in (1 << 24, 1 << 30))
    beside = hidden.communication
    assert beside.exposed == pytest.approx(beside.seconds * 24 / 132, rel=0.05)  # of the multiprocessors
    assert hidden.seconds - beside.exposed == pytest.approx(hidden.gpu_seconds)
    shared = waited.communication
    assert 0 < shared.exposed < shared.seconds
    assert waited.seconds - shared.exposed == pytest.approx(hidden.seconds - beside.exposed)
    assert (shared.ranks, shared.basis) == (8, Basis.CARD)
    assert [each.name for each in waited.kinds] == ["product"]  # of the GPU's computation
    assert not waited.is_bound_by_host  # though it computes for less than nine tenths
    unsure = step_time(ddp_step(1 << 30), LABELS, find_device("RTX 4090"))
    assert unsure.high > 2 * unsure.seconds  # no table has its link


def test_a_step_whose_collectives_take_nothing_is_not_slower():
    card = find_device("A100")
    plain = step_time(replace(ddp_step(), order=(0,) * 4, labels=(0,) * 4, after=()), LABELS, card)
    assert plain.communication is None
    for waits in (False, True):
        time = step_time(ddp_step(1 << 28, waits=waits), LABELS, card)
        assert time.seconds >= plain.seconds
        assert time.seconds - time.communication.exposed == pytest.approx(plain.seconds)


def test_a_step_that_waits_for_what_memfit_does_not_know_has_no_time():
    shared = collective("all_reduce", 8)
    both = collective("send_recv", 8)
    assert why_time_is_unknown((shared, both), machine=8) == ""
    assert "several machines" in why_time_is_unknown((shared,), machine=4)
    assert "pipeline" in why_time_is_unknown((both, replace(both, operands=())), machine=8)
