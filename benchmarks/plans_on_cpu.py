"""Compare the times of plans on the CPU with those that memfit predicts from operations measured here.

    python benchmarks/plans_on_cpu.py [--networks gpt small] [--rounds 15] [--positions 128]

The networks of planned_networks.py run as written, under plans that keep every bit, for two budgets, and in
micro-batches, unless batch normalization combines samples. The prediction has the processor seconds of each
operation, recorded in steps as written and in micro-batches of the same size, and the host's seconds for
Python, autograd and checkpoints by ``memfit doctor --time``, or assumed ones. No step under a plan is
measured for it. Variants take turns on one thread, and processor time counts: what else the machine does
matters less. Ratios are to the step as written of the same round: their median, and the interval that has
it with 95 %.

malloc keeps what is freed, for measured and recorded steps: by default it returns large tensors to the
system, and each later use faults its pages in again, so that whole batches would pay what their halves do
not. PyTorch's allocator on a GPU keeps its memory, too.

``small`` is limited by the host: 24 blocks of width 32 at batch 1, under the kinds of plans that ``memfit
plan --bitwise`` weighs for such a script. Nothing is predicted for it here.
"""

import copy
import ctypes
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from measuring import (
    at_least_1,
    command_line,
    in_turns,
    interval,
    seconds_of,
    table_head,
    table_line,
    write_json,
)
from planned_networks import NETWORKS, Network
from torch import nn

import memfit
from memfit.planning.choose_checkpointing import CheckpointChoice, CheckpointChooser
from memfit.recording.python_call_counter import PythonCallCounter
from memfit.recording.step_operations import StepOperationRecorder
from memfit.records import ASSUMED_HOST_TIMES, HostTimes, HostUnits, Operation, StepOperations
from memfit.timing.saved_host_times import saved_host_times

SMALL, WIDTH, BLOCKS = "small", 32, 24
SHARES = (0.75, 0.45)
"""Of the peak as written: the budgets."""
PARTS = (1, 2, 4)
WITHIN = 0.05
_RECORDINGS = 5
_NEVER_MAP, _NEVER_TRIM = (-4, 0), (-1, -1)
"""M_MMAP_MAX and M_TRIM_THRESHOLD, and their values. Source: mallopt(3), and malloc.h of glibc."""


@dataclass
class Variant:
    """A network under a plan, or in micro-batches."""

    name: str
    network: Network
    plan: memfit.Checkpointing | None = None
    parts: int = 1
    predicted: float | None = None
    """Its time relative to the step as written."""
    ratios: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Give it a model of its own."""
        self.model = copy.deepcopy(self.network.model)
        if self.plan is not None:
            memfit.apply(self.model, self.plan)

    def run(self, most: int | None = None) -> None:
        """Run a step, of the same random numbers for all variants; with ``most``, its first micro-batches."""
        torch.manual_seed(1)
        chunks = self.network.inputs.chunk(self.parts), self.network.targets.chunk(self.parts)
        for inputs, targets in [*zip(*chunks, strict=True)][:most]:
            (self.network.loss(self.model, inputs, targets) / self.parts).backward()

    def clear(self) -> None:
        """Set gradients to zero; they stay allocated."""
        for each in self.model.parameters():
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad.zero_()

    def step(self) -> float:
        """Run a step, and return its processor time."""
        self.clear()
        return seconds_of(self.run, time.process_time)

    def record(self) -> StepOperations:
        """Record the operations of a step; of its first micro-batch."""
        self.clear()
        recorder = StepOperationRecorder(self.model)
        recorder.start()
        self.run(1)
        return recorder.stop()

    def beside_operations(self) -> HostUnits:
        """Return what the host does in a step, or its first micro-batch, beside the operations."""
        self.clear()
        calls, nodes = PythonCallCounter(), torch._C._autograd._get_sequence_nr()
        calls.start()
        self.run(1)
        calls.stop()
        return HostUnits(
            python_calls=calls.calls,
            autograd_nodes=torch._C._autograd._get_sequence_nr() - nodes,
            gradients=len([*self.model.parameters()]),
        )


def shortened(network: Network, positions: int | None) -> Network:
    """Return a network on the first positions of its sequences, if it has tokens."""
    if network.inputs.ndim != network.targets.ndim:  # images
        return network
    return replace(network, inputs=network.inputs[:, :positions], targets=network.targets[:, :positions])


def predicted_variants(network: Network, host: HostTimes) -> Iterator[Variant]:
    """Yield a network as written, under plans, and in micro-batches, with predicted times.

    Args:
        network: what is trained.
        host: what the host takes beside operations.
    """
    mixes = any(isinstance(each, nn.BatchNorm2d) for each in network.model.modules())
    divided = {
        parts: Variant("as written" if parts == 1 else f"{parts} micro-batches", network, parts=parts)
        for parts in (PARTS[:1] if mixes else PARTS)
    }
    for each in divided.values():
        each.step()
    recorded: dict[int, list[StepOperations]] = {parts: [] for parts in divided}
    for _ in range(_RECORDINGS):
        for parts, each in divided.items():
            recorded[parts].append(each.record())
    steps = {parts: _with_medians(some) for parts, some in recorded.items()}
    beside = {parts: host.step_seconds(each.beside_operations()) for parts, each in divided.items()}
    seconds = {
        parts: parts * (beside[parts] + sum(each.seconds for each in (*step.forward, *step.backward)))
        for parts, step in steps.items()
    }
    for parts, each in divided.items():
        each.predicted = seconds[parts] / seconds[1]
        yield each
    for parts in {1, max(divided)}:
        again = beside[parts] / len(steps[parts].forward)
        chooser = CheckpointChooser(
            steps[parts], lambda operation, again=again: operation.seconds + again, host=host.one
        )
        for share in SHARES if parts == 1 else SHARES[-1:]:
            choice = chooser.choose(int(share * chooser.plain_peak)) or chooser.smallest
            name = f"plan, {share:.0%}" + f" of {parts} micro-batches" * (parts > 1)
            made = Variant(name, network, _plan_of(choice), parts)
            made.predicted = (seconds[parts] + parts * choice.seconds) / seconds[1]
            yield made


def _with_medians(steps: Sequence[StepOperations]) -> StepOperations:
    """Return a step with the median of the seconds of each operation in several."""

    def medians(parts: Sequence[tuple[Operation, ...]]) -> tuple[Operation, ...]:
        each_time = zip(*parts, strict=True)
        return tuple(
            replace(one[0], seconds=statistics.median(each.seconds for each in one)) for one in each_time
        )

    forward, backward = ([getattr(step, name) for step in steps] for name in ("forward", "backward"))
    return replace(steps[0], forward=medians(forward), backward=medians(backward))


def _plan_of(choice: CheckpointChoice) -> memfit.Checkpointing:
    return memfit.Checkpointing(regions=tuple(memfit.Region(**each.settings) for each in choice.regions))


class Block(nn.Module):
    """A transformer's block without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the block makes of (1, positions, width)."""
        heads = (each.unflatten(2, (4, -1)).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, 2))
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def small_variants() -> Iterator[Variant]:
    """Yield a network that the host limits, as written and under the kinds of plans."""
    inputs = torch.randn(1, 8, WIDTH)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    network = Network(model, inputs, inputs, lambda model, x, _: model(x).square().mean(), "?")
    first, most = (tuple(map(str, range(count))) for count in (14, 23))
    kept = ("aten.addmm.default:1", "aten.addmm.default:0", "aten.addmm.default:2")
    yield Variant("as written", network)
    yield Variant("14 modules recomputed", network, memfit.Checkpointing(modules=first))
    yield Variant("23 in part", network, memfit.Checkpointing(modules=most, save_ops=kept))
    yield Variant("tensor by tensor", network, memfit.Checkpointing(recompute="tensors"))


def measure(variants: Sequence[Variant], rounds: int) -> list[str]:
    """Measure the ratios of all variants, and return the names of plans that do not keep every bit."""
    plain, *others = variants
    plain.step()
    other_bits = []
    for each in others:
        each.step()
        pairs = zip(plain.model.parameters(), each.model.parameters(), strict=True)
        if each.parts == 1 and not all(torch.equal(one.grad, other.grad) for one, other in pairs):
            other_bits.append(each.name)
    for seconds in in_turns({f"{number}": each.step for number, each in enumerate(variants)}, rounds):
        for each, taken in zip(variants, seconds.values(), strict=True):
            each.ratios.append(taken / seconds["0"])
    return other_bits


def row_of(network: str, variant: Variant) -> tuple[str, ...]:
    """Return a row of the table."""
    median, (low, high) = statistics.median(variant.ratios), interval(variant.ratios)
    known = variant.predicted is not None
    predicted = (f"{variant.predicted:.3f}", f"{variant.predicted - median:+.3f}") if known else ("", "")
    return network, variant.name, f"{median:.3f}", f"{low:.3f} to {high:.3f}", *predicted


def main() -> None:
    """Measure, and print a row for each variant."""
    parser = command_line(__doc__, results=True)
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS, SMALL], default=[*NETWORKS, SMALL])
    parser.add_argument("--rounds", type=at_least_1, default=15)
    parser.add_argument("--positions", type=at_least_1, help="of each sequence of tokens; default: all")
    options = parser.parse_args()
    for setting in (_NEVER_MAP, _NEVER_TRIM):
        ctypes.CDLL(None).mallopt(*setting)
    torch.set_num_threads(1)
    host = saved_host_times(str(torch.__version__)) or ASSUMED_HOST_TIMES
    print(f"The host's times: {host.source}")
    print(table_head(("network", "variant", "time", "95 %", "predicted", "off by"), "llrrrr"))
    rows, wrong, errors = [], [], []
    for name in options.networks:
        torch.manual_seed(0)
        if name == SMALL:
            variants = [*small_variants()]
        else:
            variants = [*predicted_variants(shortened(NETWORKS[name](), options.positions), host)]
        wrong += [f"{name}: {each}" for each in measure(variants, options.rounds)]
        for each in variants:
            rows.append(row_of(name, each))
            print(table_line(rows[-1]), flush=True)
        errors += [
            abs(each.predicted - statistics.median(each.ratios)) for each in variants[1:] if each.predicted
        ]
        write_json(options.json, rows)
    if errors:
        held = sum(each <= WITHIN for each in errors)
        print(f"\n{held} of {len(errors)} are within {WITHIN}; the largest difference is {max(errors):.3f}.")
    if wrong:
        sys.exit(f"Not bit for bit: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
