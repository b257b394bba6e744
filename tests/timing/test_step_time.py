"""What the time of a recorded step says: its samples, its utilisation, and when there is none."""

from dataclasses import replace

import pytest

from memfit.devices import find_device
from memfit.records import (
    ASSUMED_HOST_TIMES,
    EVERY_STREAM,
    NO_STREAM,
    EventLabel,
    HostUnits,
    Operand,
    Operation,
    Phase,
    SecondsPerDriverCall,
    WholeStep,
)
from memfit.report.terminal.step_time import step_time_lines
from memfit.timing.kernel_times import Basis, KernelTimes
from memfit.timing.kernel_work import work_of
from memfit.timing.step_time import seconds_on_cpu, seconds_to_issue, step_time
from memfit.timing.step_timeline import QueuedWork, step_timeline

PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
LABELS = tuple(EventLabel(phase, "", "net", -1) for phase in PHASES)
FORWARD, BACKWARD, OPTIMIZER = range(3)


def operation(name, *operands, results, flops=0):
    base = name, -1, -1, (), (), (), flops, 0, results[0].dtype, False, 0.0, 0
    return Operation(*base, operands=operands, results=results, launches=1)


def product(dtype, size=8192, name="aten.mm.default", result=""):
    square = Operand((size, size), dtype)
    made = replace_dtype(square, result) if result else square
    scales = (Operand((), "float32"),) * 2 if name == "aten._scaled_mm.default" else ()
    return operation(name, square, square, *scales, results=(made,), flops=2 * size**3)


def replace_dtype(tensor, dtype):
    return Operand(tensor.shape, dtype)


def step_of(*parts, tf32=False):
    """Return a step of operations, each with its phase."""
    operations = tuple(each for each, _ in parts)
    labels = tuple(label for _, label in parts)
    return WholeStep(operations, tuple(range(len(parts))), labels, HostUnits(), tf32)


def time_of(step, card="A100"):
    return step_time(step, LABELS, find_device(card))


def test_no_product_beats_the_rate_of_its_precision():
    for tf32 in (False, True):
        time = time_of(step_of((product("float32"), FORWARD), tf32=tf32))
        assert 0.4 < time.utilization <= 1
    image, weight = Operand((64, 64, 56, 56), "float32"), Operand((64, 64, 3, 3), "float32")
    convolved = operation(
        "aten.convolution.default", image, weight, results=(image,), flops=2 * 64 * 64 * 64 * 9 * 56 * 56
    )
    assert 0 < time_of(step_of((convolved, FORWARD))).utilization <= 1  # cuDNN computes in TF32


@pytest.mark.parametrize(("card", "slower"), [("A100", 1), ("H100", 1), ("V100-32GB", 2), ("L4", 64)])
def test_products_in_float64_take_as_long_as_the_card_s_units_and_rest_on_its_data_sheet(card, slower):
    single, double = (KernelTimes(find_device(card)).of(product(dtype)) for dtype in ("float32", "float64"))
    assert double.seconds == pytest.approx(slower * single.seconds, rel=0.1)
    assert (double.basis, single.basis) == (Basis.DATA_SHEET, Basis.CARD)


def test_products_of_8_bits_are_faster_than_those_of_16_and_rest_on_the_data_sheet():
    scaled = product("float8_e4m3fn", name="aten._scaled_mm.default", result="bfloat16")
    eight, sixteen = (KernelTimes(find_device("H100")).of(each) for each in (scaled, product("bfloat16")))
    assert 0.4 < eight.seconds / sixteen.seconds < 0.8
    assert eight.basis is Basis.DATA_SHEET


def test_a_replay_of_a_cuda_graph_issues_all_of_its_kernels_at_once():
    parts = [(product("float16", size=64), FORWARD)] * 100
    eager = replace(step_of(*parts), host=HostUnits(operations=100, launches=100))
    replayed = replace(eager, host=HostUnits(operations=1, launches=1), replays=((0, 100),))
    assert time_of(eager).is_bound_by_host
    assert not time_of(replayed).is_bound_by_host
    assert time_of(replayed).gpu_seconds == pytest.approx(time_of(eager).gpu_seconds)
    first, *others = seconds_to_issue(replayed, LABELS, ASSUMED_HOST_TIMES)
    assert first == pytest.approx(ASSUMED_HOST_TIMES.step_seconds(replayed.host))
    assert others == [0.0] * 99


def test_calls_of_the_driver_cost_the_host_and_some_wait_for_every_stream():
    kernels = [replace(product("float16"), stream=stream) for stream in (0, 1)]
    fields = -1, -1, (), (), (), 0, 0, "", False, 0.0, 0
    wait = Operation("cuda.synchronize", *fields, stream=EVERY_STREAM, waits=True)
    free, malloc = (Operation(name, *fields, stream=NO_STREAM) for name in ("cuda.free", "cuda.malloc"))
    plain = step_of(*((each, FORWARD) for each in kernels))
    driven = step_of(
        (malloc, FORWARD), *((each, FORWARD) for each in kernels), (wait, BACKWARD), (free, BACKWARD)
    )
    again = time_of(driven).seconds - time_of(plain).seconds
    calls = SecondsPerDriverCall()
    assert again == pytest.approx(calls.malloc + calls.free)  # the GPU idles meanwhile
    assert time_of(step_of(*((each, FORWARD) for each in kernels), (malloc, FORWARD))).seconds == (
        pytest.approx(time_of(plain).seconds)  # the host is ahead
    )


def test_updates_on_the_cpu_take_the_hosts_time_and_preparing_data_does_not():
    fields = -1, -1, (), (), (), 0, 50_000_000, "", False, 0.0, 0
    update = Operation("cpu.aten::add_", *fields, stream=NO_STREAM)
    kernels = [(replace(product("float16"), waits=True), BACKWARD), (product("float16"), FORWARD)]
    plain, with_update = (
        time_of(step_of(kernels[0], *more, kernels[1])) for more in ((), ((update, OPTIMIZER),))
    )
    assert with_update.cpu_seconds == pytest.approx(1e-3)  # 50 GB/s
    assert with_update.seconds - plain.seconds == pytest.approx(1e-3)
    assert with_update.high / with_update.seconds > plain.high / plain.seconds
    assert "  Operations on the CPU take 1.00 ms of it (assumed)." in list(step_time_lines(with_update))
    prepares = (EventLabel(Phase.INPUT, "", "", -1),) * len(LABELS)
    assert seconds_on_cpu(step_of((update, FORWARD)), prepares) == [0.0]


def test_a_step_with_decompositions_has_no_time():
    square = Operand((2048, 2048), "float32")
    solved = operation("aten._linalg_svd.default", square, results=(square,))
    norm = operation("aten.linalg_vector_norm.default", square, results=(Operand((), "float32"),))
    assert time_of(step_of((product("float32"), FORWARD), (solved, FORWARD))) is None
    assert time_of(step_of((product("float32"), FORWARD), (norm, BACKWARD))) is not None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten.linalg_vector_norm.default", "reduction"),
        ("aten.softmax.int_out", "softmax"),
        ("aten.linalg_cross.default", "other"),
    ],
)
def test_what_one_kernel_computes_has_its_kind_and_what_no_rule_names_has_none(name, kind):
    square = Operand((2048, 2048), "float32")
    assert work_of(operation(name, square, square, results=(square,))).kind == kind


def test_samples_are_counted_over_micro_batches_and_unknown_where_models_take_turns():
    rows, table = Operand((4, 16), "int64"), Operand((100, 8), "float32")
    embedded = operation("aten.embedding.default", table, rows, results=(Operand((4, 16, 8), "float32"),))
    backward, update = product("float32"), product("float32", 4096)
    pass_ = [(embedded, FORWARD), (backward, BACKWARD)]
    time = time_of(step_of(*pass_, *pass_, (update, OPTIMIZER)))
    assert (time.samples, time.tokens) == (8, 128)
    time = time_of(step_of(*pass_, (update, OPTIMIZER), *pass_, (update, OPTIMIZER)))
    assert (time.samples, time.tokens) == (None, None)


def test_kernels_of_several_streams_are_no_faster_than_the_card():
    parts = [(product("float16"), FORWARD)] * 4
    one = step_of(*parts)
    several = replace(
        one,
        operations=tuple(replace(one.operations[0], stream=stream) for stream in range(4)),
    )
    assert time_of(several).seconds == pytest.approx(time_of(one).seconds, rel=0.01)
    assert time_of(several).gpu_seconds == pytest.approx(time_of(one).gpu_seconds, rel=0.01)
    assert time_of(several).utilization <= 1


def test_what_leaves_the_card_to_others_runs_beside_them():
    whole = QueuedWork(issue=0.0, seconds=4.0, share=1.0)
    joined = QueuedWork(issue=0.0, seconds=0.0, after=(1,), waits=True)
    for share, seconds in ((0.0, 4.0), (0.25, 4.75), (1.0, 7.0)):
        beside = replace(whole, seconds=3.0, stream=1, share=share)
        assert step_timeline([whole, beside, joined]).seconds == pytest.approx(seconds)
    half = replace(whole, share=0.5)
    assert step_timeline([half, replace(half, stream=1), joined]).seconds == pytest.approx(4.0)


def test_the_gpu_works_while_any_stream_does():
    kernel = QueuedWork(issue=0.0, seconds=2.0)
    copy = QueuedWork(issue=0.0, seconds=3.0, stream=1, after=(0,))
    timeline = step_timeline([kernel, copy, replace(kernel, after=(1,))])
    assert (timeline.working, timeline.seconds) == (7.0, 7.0)
    waiting = step_timeline([replace(kernel, issue=3.0)])
    assert (waiting.working, waiting.seconds) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("card", "named"), [("T4", "a T4"), ("H100", "an H100-80GB"), ("GTX 1660", "a GTX 1660")]
)
def test_a_card_has_its_article(card, named):
    first, *_ = step_time_lines(time_of(step_of((product("float32", 1024), FORWARD)), card))
    assert f" on {named}." in first


def test_a_transposed_convolution_is_another_s_gradient_of_the_data():
    small, large, weight = (
        Operand(shape, "float16") for shape in ((8, 64, 32, 32), (8, 32, 64, 64), (64, 32, 2, 2))
    )
    fields = -1, -1, (), (), (), 0, 0, "float16", False, 0.0, 0
    forward = Operation("aten.convolution.default", *fields, operands=(small, weight), results=(large,))
    backward = Operation(
        "aten.convolution_backward.default", *fields, operands=(large, small, weight), results=(small, weight)
    )
    once = 2 * 8 * 32 * 32 * 64 * 32 * 2 * 2
    assert (work_of(forward).flops, work_of(backward).flops) == (once, 2 * once)
    back = Operation("aten.convolution.default", *fields, operands=(large, weight), results=(small,))
    assert work_of(back).flops == once


def test_no_complex_product_beats_the_rate_of_float32():
    time = time_of(step_of((product("complex64"), FORWARD)), "H100")
    assert 0.4 < 8 * 8192**3 / (time.seconds * find_device("H100").rate("fp32")) <= 1
