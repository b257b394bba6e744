"""A script that is planned for, whose runs are computed instead of made."""

from dataclasses import replace

import torch

from memfit.analysis.trial_result import TrialResult
from memfit.planning.choose_checkpointing import CheckpointChooser
from memfit.planning.find_plan import find_plan
from memfit.planning.run_changes_on_ghost import PlannedScript
from memfit.planning.strategy_and_allocator_changes import AllowedChanges
from memfit.records import (
    Action,
    DeviceUse,
    EventLabel,
    Figure,
    HostUnits,
    Operand,
    Operation,
    Phase,
    Provenance,
    ScriptEnd,
    WholeStep,
)
from support.planned_networks import feed_forward
from support.traces import BASE, trace_of

MIB = 1 << 20
OUTSIDE = 100 * MIB
SPREAD = 0.5
"""Share of an assumed context by which it may be larger."""
DEVICE = DeviceUse("A100-80GB", Figure(1 << 40, Provenance.EXACT), Figure(OUTSIDE, Provenance.MEASURED), 0)


_SIZE = 4096
_SQUARE = Operand((_SIZE, _SIZE), "float32")
_PRODUCT = Operation(
    *("aten.mm.default", -1, -1, (), (), (), 2 * _SIZE**3, 0, "float32", False, 0.0, 0),
    operands=(_SQUARE, _SQUARE),
    results=(_SQUARE,),
    launches=1,
)
_LABELS = (EventLabel(Phase.FORWARD, "", "", -1),)


def work(operation):
    return (operation.flops + operation.moved) / 1e9 if operation.creates or operation.flops else 0.0


def needing(mebibytes, **fields):
    """Return a trace that reserves so much."""
    size = mebibytes * MIB
    history = [(Action.SEGMENT_ALLOC, BASE, size), (Action.ALLOC, BASE, size)]
    settings = {"expandable_segments": "True", "conf": "expandable_segments:True"}
    return trace_of(
        history,
        device=DEVICE,
        settings=settings,
        versions={"torch": "2.14.1"},
        command=("t.py",),
        **fields,
    )


def timed(trace, count, host=HostUnits()):  # noqa: B008 - frozen
    """Return a trace whose recorded step runs so many products."""
    return replace(trace, step=WholeStep((_PRODUCT,), (0,) * count, (0,) * count, host), labels=_LABELS)


def enlarged(step):
    """Return a step that holds 1,024 times as much."""
    return replace(
        step,
        storages=tuple(1024 * size for size in step.storages),
        forward=tuple(replace(each, allocated=1024 * each.allocated) for each in step.forward),
        backward=tuple(replace(each, allocated=1024 * each.allocated) for each in step.backward),
    )


class Script:
    """Runs a script whose memory is that of the model's prediction, and more.

    Args:
        more: MiB that a plan needs beyond its prediction, by the number of plans that ran before.
        blocks: of the model.
    """

    def __init__(self, more=lambda _: 0, blocks=4):
        torch.manual_seed(0)
        network = feed_forward(blocks)
        network.gradients()  # which exist from the second step on
        self.step = enlarged(network.record())
        self.chooser = CheckpointChooser(self.step, work)
        self.offloading = CheckpointChooser(self.step, work, copy)
        self.more = more
        self.changes = []
        self.plain = -(-self.chooser.plain_peak // MIB)
        self.every_block = ScriptEnd("refused", 0, "no block repeats")

    def __call__(self, change, _what):
        if change.operations and not change.strategies:
            return TrialResult(needing(self.plain), operations=self.step)
        regions = change.plan.get("checkpointing", {}).get("regions")
        if regions is None:
            return self.every_block
        self.changes.append(regions)
        chosen = chosen_ways(regions)
        offload = change.plan.keys() == {"checkpointing", "offload"}
        peak = self._peak(chosen, self.offloading if offload else self.chooser)
        more = self.more(len(self.changes) - 1)
        return TrialResult(needing(-(-peak // MIB) + more), ("Net (optimizer: t:1)",))

    @staticmethod
    def _peak(chosen, chooser):
        """Return the prediction of the choice that is exactly this."""
        program = chooser._program
        fixed = {
            column: float(chosen.get(module) == (way[0].save_ops, way[0].split_at))
            for module, ways in chooser._ways.items()
            for way, column in zip(ways, chooser._columns[module], strict=True)
        }
        return round(program.minimize(chooser._budget, fixed=fixed).objective * MIB)


def chosen_ways(regions):
    return {
        name: (tuple(each.get("save_ops", ())), tuple(each.get("split_at", ())))
        for each in regions
        for name in each["modules"]
    }


def copy(size):
    return size / 1e6


def find(run, budget, allowed=AllowedChanges()):  # noqa: B008 - frozen
    return find_plan(PlannedScript(run, work, copy, "a rule"), budget, allowed)


def planned(script, share):
    return find(script, int(share * script.plain) * MIB + OUTSIDE)


def assumed(script, spread=SPREAD):
    """Return a script's runs with an assumed context, which may be larger by a share."""

    def run(change, what):
        result = script(change, what)
        if isinstance(result, ScriptEnd):
            return result
        device = result.trace.device
        context = replace(device.context, provenance=Provenance.ASSUMED)
        trace = replace(result.trace, device=replace(device, context=context, context_spread=spread))
        return replace(result, trace=trace)

    return run
