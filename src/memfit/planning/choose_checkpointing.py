"""Choose how to checkpoint each module: the least time under a budget, as a mixed-integer program.

    x[m, k]   1 if module m is checkpointed in its k-th way; at most one module on each path of the tree
    o[c]      1 if no module around call c is checkpointed: it keeps what autograd saves
    y[s]      1 if storage s is kept from the forward to the backward
    a[g]      bytes kept from the segments up to g

    minimize    sum of seconds[m, k] x[m, k]
    such that   y[s] >= o[c]              for what autograd saves in call c
                y[s] >= x[m, k]           for what this way of checkpointing keeps
                a[g] = a[g - 1] + bytes of the storages y[s] that segment g created
                a[g] + recomputed so far, if g is in a checkpointed module + besides[g]  <=  budget

The relaxation bounds what any choice among these options can reach. The solver's work is limited, not its
time: every machine finds the same. Beside what it finds stand choices that need no solver: modules of one
kind checkpointed alike (``uniform_checkpointing.py``), and the tensors of the whole model recomputed one by
one (``tensor_recompute_options.py``), which excludes all others.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from memfit.planning.mixed_integer_solver import INFINITY, MixedIntegerProgram, MixedIntegerSolution
from memfit.planning.module_checkpoint_options import (
    FREE,
    Copy,
    ModuleCheckpointOption,
    Seconds,
    bytes_of_storages,
    bytes_recomputed_in_segments,
    module_call_splits_to_try,
    module_checkpoint_option,
    module_checkpoint_option_in_parts,
    parts_of_module_call,
    save_ops_to_try,
    useful_checkpoint_options,
)
from memfit.planning.step_memory_model import StepMemoryModel, module_calls_inside
from memfit.planning.tensor_recompute_options import TensorRecomputation, tensor_recomputations
from memfit.planning.uniform_checkpointing import Selection, UniformCheckpointingSearch
from memfit.records import HostUnits, ModuleCall, StepOperations

_MIB = float(1 << 20)
_GAP = 0.01
"""Of the seconds added: a choice this close to the bound is good enough."""
_COST = 1000.0
"""Cost of running the whole forward again: costs far below 1 would be lost in HiGHS's tolerances."""
_COST_GAP = 5.0
"""A cost this close to the bound is good enough: at most half of what another plan must be expected to save
to be tried. Seconds of operations are less accurate by far. Bytes have no gap."""
_KNOWN_GAP = 2.0
"""The same for choices that need no solver. They keep more single results, which may take the host longer
than is counted here."""
_LESS = 0.65
"""Effort for the smallest choice, which is hard to make fast, and runs only where a budget is not reached."""
_TOLERANCE = 1e-4
"""Share of the smallest peak by which its budget is raised, because HiGHS rounds."""
_WORTH = 0.002
"""Share of all activations that checkpointing a module must be able to save."""
_ON_THEIR_WAY = 2
"""Offloaded inputs on the device in the backward: a module's, and the next one's, which are prefetched."""
_HALF = 0.5
"""A column of 0 or 1 that is above this is 1."""


_Ways = dict[str, list[list[ModuleCheckpointOption]]]
_Again = dict[str, list[Counter[int]]]
"""By module and way: the bytes that its calls have recomputed when the backward reaches a segment."""


@dataclass(frozen=True, slots=True, order=True)
class RegionSettings:
    """A ``memfit.Region``, without the class, which needs torch."""

    modules: tuple[str, ...]
    save_ops: tuple[str, ...] = ()
    split_at: tuple[str, ...] = ()
    recompute: str = "module"

    @property
    def settings(self) -> dict[str, list[str] | str]:
        """Its modules, and what differs from the defaults; as in JSON."""
        given: dict[str, list[str] | str] = {
            "modules": [*self.modules],
            "save_ops": [*self.save_ops],
            "split_at": [*self.split_at],
            "recompute": self.recompute if self.recompute != "module" else "",
        }
        return {name: value for name, value in given.items() if value}


@dataclass(frozen=True, slots=True)
class CheckpointChoice:
    """How to checkpoint a model's modules."""

    regions: tuple[RegionSettings, ...]
    """The modules that are checkpointed."""
    seconds: float
    """That recomputing adds to a step."""
    bound: float
    """No choice among the options adds fewer seconds."""
    peak: int
    """Bytes of the step at its peak that the model predicts, counted from its beginning."""


class CheckpointChooser:
    """Chooses under one budget after another.

    Args:
        step: the plain step.
        seconds: how long an operation takes.
        copy: how long it takes to copy bytes to the host and back, if the inputs of checkpointed modules wait
            there; None if they stay.
        host: seconds that the host needs for what checkpointing adds; 0 where that waits for nothing, because
            kernels take longer.
        in_parts: whether a module may be recomputed in parts: batch slices do not permit it.
    """

    def __init__(
        self,
        step: StepOperations,
        seconds: Seconds,
        copy: Copy | None = None,
        host: HostUnits = FREE,
        *,
        in_parts: bool = True,
    ) -> None:
        self._memory = StepMemoryModel.of(step)
        self._program = MixedIntegerProgram()
        self._budget = self._program.column(upper=INFINITY)
        """Column: MiB."""
        self._ways = _ways(self._memory, seconds, copy, host, in_parts=in_parts)
        again = _recomputed(self._memory, self._ways)
        self._uniform = UniformCheckpointingSearch(self._memory, self._ways, again)
        self._tensors = tensor_recomputations(self._memory, seconds, host) if copy is None else []
        forward = sum(seconds(operation) for operation in step.forward)
        self._unit = forward / _COST if forward else 1.0
        """Seconds by which a cost of 1 makes a step longer."""
        self._columns = {
            module: [
                self._program.column(sum(each.seconds for each in way) / self._unit, integral=True)
                for way in ways
            ]
            for module, ways in self._ways.items()
        }
        kept = self._kept(self._keepers())
        self._held: list[tuple[dict[int, float], float]] = [
            ({column: 1.0} | recomputed, besides / _MIB)
            for column, recomputed, besides in zip(
                kept, self._recomputed(again), self._memory.besides, strict=True
            )
        ]
        """By segment: the columns that add up to what its backward holds, and the rest."""
        for terms, besides in self._held:
            self._program.row(terms | {self._budget: -1.0}, -INFINITY, -besides)

    @property
    def plain_peak(self) -> int:
        """Bytes of the plain step at its peak, counted from its beginning."""
        return self._memory.peak

    def choose(self, budget: int, effort: float = 1.0) -> CheckpointChoice | None:
        """Return the fastest choice found whose predicted peak is at most so many bytes; None without one.

        Args:
            budget: the bytes, counted from the beginning of the step.
            effort: as for ``MixedIntegerProgram.minimize``.
        """
        uniform = self._uniform.fastest(budget)
        fitting = [self._tensor_choice(each) for each in self._tensors if each.peak <= budget]
        fitting += [] if uniform is None else [self._choice(uniform)]
        known = min((each.seconds for each in fitting), default=INFINITY) / self._unit
        found = self._program.minimize(
            fixed={self._budget: budget / _MIB},
            gap=_GAP,
            cost_gap=_COST_GAP,
            effort=effort,
            enough=min(known * (1 - _GAP), known - _KNOWN_GAP),
        )
        bound = INFINITY if found is None else found.bound * self._unit
        if found is not None and found.values:
            fitting.append(self._choice(self._selection(found)))
        choice = min(fitting, key=lambda each: each.seconds, default=None)
        return None if choice is None else replace(choice, bound=max(0.0, min(bound, choice.seconds)))

    @cached_property
    def least(self) -> CheckpointChoice:
        """A choice with the smallest predicted peak; there may be faster ones."""
        small = [self._choice(self._uniform.smallest), *map(self._tensor_choice, self._tensors)]
        found = self._program.minimize(
            self._budget,
            gap=_GAP / 10,
            effort=_LESS,
            enough=min(each.peak for each in small) / _MIB * (1 - _GAP / 10),
        )
        if found is not None and found.values:
            small.append(self._choice(self._selection(found)))
        return min(small, key=lambda each: each.peak)

    @cached_property
    def smallest(self) -> CheckpointChoice:
        """The fastest of the choices with the smallest predicted peak."""
        return self.choose(int(self.least.peak * (1 + _TOLERANCE)), _LESS) or self.least

    def _selection(self, found: MixedIntegerSolution) -> Selection:
        return self._uniform.in_order(
            {
                module: way
                for module, columns in self._columns.items()
                for way, column in enumerate(columns)
                if found.values[column] > _HALF
            }
        )

    def _choice(self, selection: Selection) -> CheckpointChoice:
        modules: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = defaultdict(list)
        for module in self._ways:
            if module in selection:
                option = self._ways[module][selection[module]][0]
                modules[option.save_ops, option.split_at].append(module)
        regions = (RegionSettings(tuple(names), *way) for way, names in modules.items())
        seconds, peak = self._uniform.seconds(selection), self._uniform.peak(selection)
        return CheckpointChoice(tuple(sorted(regions)), seconds, 0.0, peak)

    def _tensor_choice(self, option: TensorRecomputation) -> CheckpointChoice:
        region = RegionSettings((self._memory.step.calls[0].module,), option.save_ops, recompute="tensors")
        return CheckpointChoice((region,), option.seconds, 0.0, option.peak)

    def _keepers(self) -> dict[int, list[dict[int, float]]]:
        """Say which calls are in no checkpointed module, and return the columns that keep each storage.

        Of the columns of one dict, at most one is 1.
        """
        keepers: dict[int, list[dict[int, float]]] = defaultdict(list)
        turns: Counter[str] = Counter()
        everywhere = self._program.column()
        self._program.row({everywhere: 1.0}, 1.0, 1.0)
        opened: list[int] = []
        for call in self._memory.step.calls:
            own = around = opened[call.parent] if call.parent >= 0 else everywhere
            if columns := self._columns.get(call.module):
                own = self._program.column()
                self._program.row({own: 1.0, around: -1.0} | dict.fromkeys(columns, 1.0), 0.0, 0.0)
                keeping: dict[int, dict[int, float]] = defaultdict(dict)
                for column, way in zip(columns, self._ways[call.module], strict=True):
                    for storage in way[turns[call.module]].keeps:
                        keeping[storage][column] = 1.0
                for storage, ways in keeping.items():
                    keepers[storage].append(ways)
            turns[call.module] += 1
            for storage in call.saves:
                keepers[storage].append({own: 1.0})
            opened.append(own)
        return keepers

    def _kept(self, keepers: Mapping[int, list[dict[int, float]]]) -> list[int]:
        """Return the columns of the MiB kept up to each segment."""
        terms: list[dict[int, float]] = [{} for _ in self._memory.starts]
        for storage, some in keepers.items():
            segment, size = self._memory.segment_of[storage], self._memory.step.storages[storage] / _MIB
            if segment < 0 or not size:
                continue
            if len(some) == 1:
                is_kept = some[0]
            else:
                column = self._program.column()
                for one in some:
                    self._program.row({column: 1.0} | dict.fromkeys(one, -1.0), 0.0, INFINITY)
                is_kept = {column: 1.0}
            for column in is_kept:
                terms[segment][column] = terms[segment].get(column, 0.0) - size
        kept: list[int] = []
        for segment_terms in terms:
            column = self._program.column(upper=INFINITY)
            before = {kept[-1]: -1.0} if kept else {}
            self._program.row({column: 1.0} | before | segment_terms, 0.0, 0.0)
            kept.append(column)
        return kept

    def _recomputed(self, again: _Again) -> list[dict[int, float]]:
        """Return the MiB that checkpointed modules have recomputed when the backward reaches a segment."""
        terms: list[dict[int, float]] = [{} for _ in self._memory.starts]
        for module, columns in self._columns.items():
            for column, held in zip(columns, again[module], strict=True):
                for segment, size in held.items():
                    terms[segment][column] = size / _MIB
        return terms


def _recomputed(memory: StepMemoryModel, ways: _Ways) -> _Again:
    step = memory.step
    inside = module_calls_inside(step.calls)
    found: _Again = {module: [Counter() for _ in some] for module, some in ways.items()}
    turns: Counter[str] = Counter()
    for number, call in enumerate(step.calls):
        turn = turns[call.module]
        turns[call.module] += 1
        for held, way in zip(found.get(call.module, ()), ways.get(call.module, ()), strict=True):
            parts = parts_of_module_call(step, call, inside[number], way[turn].split_at)
            besides = _ON_THEIR_WAY * way[turn].offloaded
            for segment, size in bytes_recomputed_in_segments(memory, parts, way[turn].keeps).items():
                if besides + size:
                    held[segment] = besides + size
    return found


def _ways(
    memory: StepMemoryModel, seconds: Seconds, copy: Copy | None, host: HostUnits, *, in_parts: bool
) -> _Ways:
    step = memory.step
    calls: dict[str, list[int]] = defaultdict(list)
    for number, call in enumerate(step.calls):
        calls[call.module].append(number)
    inside = module_calls_inside(step.calls)
    changed = frozenset(storage for operation in step.forward for storage in operation.writes)
    everything = bytes_of_storages(step, {storage for call in step.calls for storage in call.saves})
    found: _Ways = {}
    for module, numbers in calls.items():
        if not module or any(_changes_arguments(step, step.calls[number]) for number in numbers):
            continue
        first = step.calls[numbers[0]]
        plain = frozenset(storage for number in inside[numbers[0]] for storage in step.calls[number].saves)
        sets = save_ops_to_try(step, first, seconds, changed)
        tried = [module_checkpoint_option(step, first, ops, seconds, copy, host) for ops in sets]
        best = useful_checkpoint_options(step, tried, plain)
        least = min((bytes_of_storages(step, option.keeps) for option in best), default=0)
        if best and (bytes_of_storages(step, plain) - least) * len(numbers) >= _WORTH * everything:
            found[module] = [
                [
                    module_checkpoint_option(step, step.calls[number], option.save_ops, seconds, copy, host)
                    for number in numbers
                ]
                for option in best
            ]
            splits = module_call_splits_to_try(memory, first, inside[numbers[0]]) if in_parts else []
            found[module] += [
                [
                    module_checkpoint_option_in_parts(
                        step, step.calls[number], inside[number], split_at, seconds, copy, host
                    )
                    for number in numbers
                ]
                for split_at in splits
            ]
    return found


def _changes_arguments(step: StepOperations, call: ModuleCall) -> bool:
    """Whether a call changes in place what it was passed, as an in-place ReLU does: it cannot run again."""
    passed = set(call.reads)
    return any(passed.intersection(each.writes) for each in step.forward[call.first : call.end])
