"""The records that stages hand to each other; nothing here computes anything.

Device ─┐
ghost, run, recording ─────┴─> Trace ──> Timeline ──> DryRun ──> report
events     bytes        the answer
+ tables   per event
"""

from memfit.records.breakdown import Breakdown, BreakdownRow, GroupBy, LiveAllocation, Moment, PhaseChange
from memfit.records.context import ContextReport, ContextStage, ContextTrial
from memfit.records.dataflow import Dataflow, GraphValue
from memfit.records.dry_run import Advice, DryRun, Growth, OutOfMemory, Term
from memfit.records.fragmentation import Fragmentation, Hole, Pin, ReservedBytes, ReservedMoment
from memfit.records.provenance import Figure, Note, Provenance, worst
from memfit.records.trace import (
    ARENA,
    DEFAULT_POOL,
    Action,
    Block,
    Category,
    DeviceUse,
    Events,
    Frame,
    Label,
    Machine,
    Mark,
    MarkKind,
    Phase,
    Place,
    ScriptEnd,
    Segment,
    Tensor,
    Timeline,
    Trace,
)

__all__ = [
    "ARENA",
    "DEFAULT_POOL",
    "Action",
    "Advice",
    "Block",
    "Breakdown",
    "BreakdownRow",
    "Category",
    "ContextReport",
    "ContextStage",
    "ContextTrial",
    "Dataflow",
    "DeviceUse",
    "DryRun",
    "Events",
    "Figure",
    "Fragmentation",
    "Frame",
    "GraphValue",
    "GroupBy",
    "Growth",
    "Hole",
    "Label",
    "LiveAllocation",
    "Machine",
    "Mark",
    "MarkKind",
    "Moment",
    "Note",
    "OutOfMemory",
    "Phase",
    "PhaseChange",
    "Pin",
    "Place",
    "Provenance",
    "ReservedBytes",
    "ReservedMoment",
    "ScriptEnd",
    "Segment",
    "Tensor",
    "Term",
    "Timeline",
    "Trace",
    "worst",
]
