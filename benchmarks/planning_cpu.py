"""Plans carried out on the CPU, beside the policies that people use: peak and time of a step, measured.

    python benchmarks/planning_cpu.py [--network gpt] [--budgets 410,330,213] [--rounds 15]

The planner gets the seconds of each operation as measured on this machine, when it runs again, those of a
plain step in as many micro-batches, and budgets in MiB: by default shares of the plain peak. A choice that
needs more when it runs is made again for less, as ``memfit plan`` does: the recorder on the CPU does not see
the scratch memory of operations. All variants take turns, one step each, on one thread. The peak is that of
PyTorch's CPU allocator, over what is allocated between steps (parameters, gradients, inputs). Times are
processor time, relative to the plain step of the same round: the median, and the interval that covers the
true median with 95 %. Gradients of every variant are compared with those of the plain step; where a step
draws random numbers, they are the same draws, but for micro-batches.

Peers: checkpointing of every block and of every second one; PyTorch's selective checkpointing that keeps
matrix products; its ``activation_memory_budget`` for compiled graphs (aot_eager), one share in a run, because
compiled code is shared by all models of a class; with ``--sac-ilp``, its ``sac_ilp`` for budgets in GiB,
which include parameters and gradients (``sac_ilp_peer.py`` names the packages it needs).
"""

import copy
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from measuring import MIB, command_line, in_turns, interval, seconds_of, table_head, table_line
from planned_networks import NETWORKS, Network
from sac_ilp_peer import SacIlp
from torch import nn
from torch.profiler import ProfilerActivity, profile

import memfit
from memfit.planning.choose_checkpointing import CheckpointChoice, CheckpointChooser
from memfit.planning.sample_independence import why_samples_depend
from memfit.recording.step_operations import StepOperationRecorder
from memfit.records import Operation, StepOperations

MATRIX_PRODUCTS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.convolution",
    "aten._scaled_dot_product_flash_attention_for_cpu",
)
SHARES = (0.85, 0.7, 0.55, 0.4, 0.25)
PARTS = (1, 2, 4)
_RECORDINGS = 5
_RUNS = 10
"""Of choices for a budget, at most."""


@dataclass
class Variant:
    """A model under one policy."""

    name: str
    network: Network
    model: nn.Module
    parts: int = 1
    """Micro-batches."""
    runs: Callable[..., torch.Tensor] | None = None
    """What computes the loss of inputs and targets, if not the network's own."""
    predicted: float | None = None
    """Time that the planner predicted."""
    ratios: list[float] = field(default_factory=list)
    peak: int = 0
    differs: float = 0.0
    """From the plain gradients, relative to the largest of each parameter."""

    def run(self, parts: int | None = None) -> None:
        """Run a step, of the same random numbers for all variants; with ``parts``, the first of so many."""
        torch.manual_seed(1)
        batches = zip(
            self.network.inputs.chunk(parts or self.parts),
            self.network.targets.chunk(parts or self.parts),
            strict=True,
        )
        for inputs, targets in batches if parts is None else [next(batches)]:
            loss = self.runs or (lambda *batch: self.network.loss(self.model, *batch))
            (loss(inputs, targets) / (parts or self.parts)).backward()

    def clear(self) -> None:
        """Set gradients to zero; they stay allocated."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()

    def step(self) -> float:
        """Run a step, and return its processor time."""
        self.clear()
        return seconds_of(self.run, time.process_time)

    def record(self, parts: int = 1) -> StepOperations:
        """Record a step's operations: of the first of so many micro-batches."""
        self.clear()
        recorder = StepOperationRecorder(self.model)
        recorder.start()
        self.run(parts)
        return recorder.stop()

    def measure(self) -> None:
        """Measure the peak of a step."""
        self.step()
        self.clear()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.run()
        events = profiler.profiler.kineto_results.events()
        changes = [(each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"]
        held = 0
        for _, size in sorted(changes, key=lambda each: each[0]):
            held += size
            self.peak = max(self.peak, held)


def main() -> None:
    """Measure, and print a row for each policy."""
    parser = command_line(__doc__)
    parser.add_argument("--network", choices=NETWORKS, default="gpt")
    parser.add_argument("--budgets", help="MiB, separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--share", type=float, help="activation_memory_budget of a compiled peer")
    parser.add_argument("--sac-ilp", default="", help="GiB, separated by commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = NETWORKS[options.network]()
    budgets = [int(budget) for budget in options.budgets.split(",")] if options.budgets else []
    ilp = [float(budget) for budget in filter(None, options.sac_ilp.split(","))]
    variants = list(_variants(network, budgets, options.share, NETWORKS[options.network], ilp))
    for seconds in in_turns({f"{number}": each.step for number, each in enumerate(variants)}, options.rounds):
        for each, taken in zip(variants, seconds.values(), strict=True):
            each.ratios.append(taken / seconds["0"])
    print(table_head(("policy", "peak MiB", "time", "95 %", "predicted", "gradients"), "lrrrrl"))
    for each in variants:
        low, high = interval(each.ratios)
        predicted = "" if each.predicted is None else f"{each.predicted:.3f}"
        times = f"{statistics.median(each.ratios):.3f}", f"{low:.3f} to {high:.3f}", predicted
        gradients = f"within {each.differs:.0e}" if each.differs else "bit for bit"
        print(table_line((each.name, f"{each.peak / MIB:.1f}", *times, gradients)))
    wrong = [
        each.name for each in variants if each.name.startswith("plan") and each.differs and each.parts == 1
    ]
    if wrong:
        print(f"NOT BIT FOR BIT: {', '.join(wrong)}", file=sys.stderr)
    sys.exit(bool(wrong))


def _variants(
    network: Network,
    budgets: list[int],
    share: float | None,
    make: Callable[[], Network],
    ilp: list[float],
) -> Iterator[Variant]:
    plain = _variant(network, "none")
    plain.record()
    steps = {parts: _fastest(plain, parts) for parts in PARTS if len(network.inputs) % parts == 0}
    plain.measure()
    plain.step()
    gradients = [each.grad.clone() for each in plain.model.parameters()]
    made = [
        _variant(network, "every block", memfit.Checkpointing(network.blocks)),
        _variant(network, "every 2nd block", memfit.Checkpointing(network.blocks, every=2)),
        _variant(
            network,
            "every block, matrix products kept",
            memfit.Checkpointing(network.blocks, save_ops=MATRIX_PRODUCTS),
        ),
        *([_compiled(network, share)] if share is not None else []),
        *_of_sac_ilp(network, make, steps[1], ilp),
        *_planned(network, steps, budgets or [int(share * plain.peak / MIB) for share in SHARES]),
    ]
    if hasattr(network.model, "hidden"):
        made += [_chunked(network, parts) for parts in (1, 2)]
    yield plain
    for each in made:
        each.measure()
        each.step()
        each.differs = max(map(_difference, gradients, (other.grad for other in each.model.parameters())))
        yield each


def _variant(
    network: Network, name: str, plan: memfit.Checkpointing | None = None, parts: int = 1
) -> Variant:
    made = Variant(name, network, copy.deepcopy(network.model), parts)
    if plan is not None:
        memfit.apply(made.model, plan)
    return made


def _compiled(network: Network, share: float) -> Variant:
    """Return the model compiled with a share of its activations as budget; its graph keeps it."""
    from torch._functorch import config

    made = _variant(network, f"activation_memory_budget {share}")
    compiled = torch.compile(made.model, backend="aot_eager")
    made.runs = lambda inputs, targets: network.loss(compiled, inputs, targets)
    config.activation_memory_budget = share
    made.step()
    config.activation_memory_budget = 1.0
    return made


def _of_sac_ilp(
    network: Network, make: Callable[[], Network], step: StepOperations, budgets: list[float]
) -> Iterator[Variant]:
    if not budgets:
        return
    planner = SacIlp(make, step)
    for budget in budgets:
        choice = planner.choose(budget)
        if choice is None:
            print(f"sac_ilp: nothing for {budget:g} GiB")
            continue
        made = _variant(network, f"sac_ilp {budget:g} GiB", choice)
        try:
            made.step()
        except RuntimeError as error:
            print(f"sac_ilp {budget:g} GiB: {str(error).splitlines()[0]}")
        else:
            yield made


def _chunked(network: Network, parts: int) -> Variant:
    """Return the model with its head and loss in eight slices."""
    made = _variant(network, f"head in 8 chunks{f', {parts} micro-batches' * (parts > 1)}", parts=parts)
    head = memfit.ChunkedHead(made.model.head, chunks=8)
    made.runs = lambda inputs, targets: head(made.model.hidden(inputs), targets)
    return made


def _planned(network: Network, steps: dict[int, StepOperations], budgets: list[int]) -> Iterator[Variant]:
    """Yield the plans for each budget: bit for bit, and with micro-batches if samples are independent."""
    started = time.monotonic()
    dispatch = _dispatch_seconds(network, steps[1])
    again = _seconds_again(network, steps[1], dispatch)
    choosers = {parts: CheckpointChooser(step, again, dispatch=dispatch) for parts, step in steps.items()}
    dependent = why_samples_depend(steps[1], steps[PARTS[1]]) if PARTS[1] in steps else "one sample"
    if dependent:
        print(f"No micro-batches: {dependent}.")
    divided = [_variant(network, "none", parts=parts) for parts in choosers]
    plain = dict(zip(choosers, _step_seconds(divided), strict=True))
    plans: dict[tuple[int, int], tuple[Variant, float]] = {}
    for budget in budgets:
        for parts in PARTS[:1] if dependent else choosers:
            found = _fitting(network, choosers[parts], budget * MIB, parts)
            if found is not None:
                plans[budget, parts] = found[0], (plain[parts] + parts * found[1].seconds) / plain[1]
        if (budget, 1) not in plans:
            smallest = math.ceil(choosers[1].smallest.peak / MIB)
            print(f"{budget} MiB: no plan bit for bit; the smallest is predicted to need {smallest} MiB")
    print(f"planned {len(budgets)} budgets in {time.monotonic() - started:.1f} s")
    for budget in budgets:
        ways = [parts for other, parts in plans if other == budget]
        best = min(ways, key=lambda parts: plans[budget, parts][1], default=1)
        for parts in sorted({1, best} & set(ways)):
            made, made.predicted = plans[budget, parts]
            made.name = f"plan for {budget} MiB{f', {parts} micro-batches' * (parts > 1)}"
            yield made


def _fitting(
    network: Network, chooser: CheckpointChooser, budget: int, parts: int
) -> tuple[Variant, CheckpointChoice] | None:
    """Return the fastest choice that fits when it runs: the chooser's budget is what the last one left."""
    target = budget
    for _ in range(_RUNS):
        choice = chooser.choose(target)
        if choice is None:
            return None
        regions = tuple(memfit.Region(**each.settings) for each in choice.regions)
        made = _variant(network, "plan", memfit.Checkpointing(regions=regions) if regions else None, parts)
        made.measure()
        if made.peak <= budget:
            made.peak = 0
            return made, choice
        target = min(target - 1, choice.peak - (made.peak - budget) // 2)
    return None


def _fastest(plain: Variant, parts: int) -> StepOperations:
    """Return a recorded step, with the least time that each operation took in several."""
    recorded = [plain.record(parts) for _ in range(_RECORDINGS)]

    def least(operations: list[tuple[Operation, ...]]) -> tuple[Operation, ...]:
        return tuple(
            replace(each[0], seconds=min(one.seconds for one in each))
            for each in zip(*operations, strict=True)
        )

    forward, backward = ([getattr(step, name) for step in recorded] for name in ("forward", "backward"))
    return replace(recorded[0], forward=least(forward), backward=least(backward))


def _seconds_again(network: Network, plain: StepOperations, dispatch: float) -> Callable[[Operation], float]:
    """Return how long an operation takes when it runs again in the backward.

    That is its time in the forward, times how much longer all operations of its name took when all ran again,
    and its share of what that step took beyond its operations: Python's own time.
    """
    whole = memfit.Checkpointing(regions=(memfit.Region("", recompute="tensors"),))
    variant = _variant(network, "recomputed", whole)
    recomputed = _fastest(variant, 1)
    as_written, with_all = _step_seconds([_variant(network, "none"), variant])
    operations = sum(map(_seconds, recomputed.backward)) - sum(map(_seconds, plain.backward))
    more_steps = len(recomputed.backward) - len(plain.backward)
    python = max(with_all - as_written - operations - dispatch * len(plain.forward), 0.0) / more_steps
    forward, backward, more = (
        _by_name(each) for each in (plain.forward, plain.backward, recomputed.backward)
    )
    factors = {
        name: (more[name] - backward[name]) / seconds for name, seconds in forward.items() if seconds > 0
    }
    return lambda operation: operation.seconds * max(factors.get(operation.name, 1.0), 1.0) + python


def _step_seconds(variants: list[Variant]) -> list[float]:
    """Return the median seconds of each variant's step, with Python's own, which are no operation's."""
    seconds = [[each.step() for each in variants] for _ in range(1 + _RECORDINGS)]
    return [statistics.median(taken) for taken in zip(*seconds[1:], strict=True)]


def _seconds(operation: Operation) -> float:
    return operation.seconds


def _by_name(operations: tuple[Operation, ...]) -> Counter[str]:
    seconds: Counter[str] = Counter()
    for each in operations:
        seconds[each.name] += each.seconds
    return seconds


def _dispatch_seconds(network: Network, step: StepOperations) -> float:
    """Return the seconds for asking of an operation whether its results are kept, on average.

    Small operations would show too little: large tensors push Python's own memory out of the CPU's caches.
    All results are kept, so that the memory is the same.
    """
    names = tuple(sorted({operation.name for operation in step.forward}))
    kept = memfit.Region("", recompute="tensors", save_ops=names)
    models = [
        _variant(network, "none").model,
        _variant(network, "kept", memfit.Checkpointing(regions=(kept,))).model,
    ]
    seconds: list[list[float]] = [[], []]
    for _ in range(2 * _RECORDINGS):
        for taken, model in zip(seconds, models, strict=True):
            started = time.process_time()
            network.loss(model, network.inputs, network.targets)
            taken.append(time.process_time() - started)
    plain, asked = map(statistics.median, seconds)
    return max(asked - plain, 0.0) / len(step.forward)


def _difference(plain: torch.Tensor, other: torch.Tensor) -> float:
    if torch.equal(plain, other):
        return 0.0
    return float((plain - other).abs().max() / plain.abs().max())


if __name__ == "__main__":
    main()
