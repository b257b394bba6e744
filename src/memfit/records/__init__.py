"""The records that stages exchange; nothing here computes anything.

Device ─┐
ghost, run, recording ─────┴─> Trace ──> Timeline ──> DryRun ──> report
events     bytes        the answer
+ tables   per event
"""

from memfit.records.allocator_comparison import (
    AllocatorComparison,
    AllocatorSetting,
    CallRates,
    DriverCalls,
    FailedMalloc,
    Replay,
    SettingOutcome,
)
from memfit.records.attribution import Attribution
from memfit.records.breakdown import Breakdown, BreakdownRow, GroupBy, LiveAllocation, MemoryPeak, PhaseChange
from memfit.records.card_context import ContextReport, ContextStage, ContextTrial, NcclMeasurement, NcclStage
from memfit.records.change import Change, DividedBatches, Equality, equality_of
from memfit.records.dataflow import Dataflow, GraphValue
from memfit.records.dry_run import (
    Advice,
    ByteRange,
    DryRun,
    Growth,
    OutOfMemory,
    PeakRange,
    RangeCause,
    RankRole,
    SizeBound,
    Term,
)
from memfit.records.explanation import Explanation
from memfit.records.fed_samples import FedSamples, FedTensor
from memfit.records.fragmentation import Fragmentation, Hole, PinningBlock, ReservedBytes, ReservedMemoryUse
from memfit.records.gpus_for import GpusFor
from memfit.records.longest_batch import BatchSize, LoaderScan, LongestBatch, MeasuredBatch
from memfit.records.marks import Mark, MarkKind, Saved, Untrained
from memfit.records.max_batch import BatchLimit, BatchRun, MaxBatch
from memfit.records.memory_check import CheckedFigure, CheckVerdict, MemoryBaseline, MemoryCheck
from memfit.records.provenance import Figure, Note, Provenance, worst
from memfit.records.run_difference import RowChange, RunDifference
from memfit.records.run_stages import Stage, StageUse
from memfit.records.schema_version import SCHEMA_VERSION
from memfit.records.script_options import LoaderBatchSize, OptionPurpose, ScriptOption
from memfit.records.script_plan import PlanRun, ScriptPlan
from memfit.records.step_operations import (
    LEAST_RECOMPUTED,
    ModuleCall,
    Operation,
    OperationCounts,
    StepOperations,
    can_run_again,
    is_counted,
)
from memfit.records.strategy_comparison import ComparedRun, StrategyComparison
from memfit.records.trace import (
    ARENA,
    DEFAULT_POOL,
    Action,
    Category,
    ChildProcess,
    DeviceUse,
    Events,
    Frame,
    JobRank,
    Label,
    Machine,
    Phase,
    ScriptEnd,
    ScriptLocation,
    Segment,
    Shortened,
    SnapshotBlock,
    TensorInfo,
    Timeline,
    Trace,
)
from memfit.records.verification import (
    CountedOperations,
    GradientDifference,
    MeasuredPeak,
    Verification,
    VerificationVerdict,
)

__all__ = [
    "ARENA",
    "DEFAULT_POOL",
    "LEAST_RECOMPUTED",
    "SCHEMA_VERSION",
    "Action",
    "Advice",
    "AllocatorComparison",
    "AllocatorSetting",
    "Attribution",
    "BatchLimit",
    "BatchRun",
    "BatchSize",
    "Breakdown",
    "BreakdownRow",
    "ByteRange",
    "CallRates",
    "Category",
    "Change",
    "CheckVerdict",
    "CheckedFigure",
    "ChildProcess",
    "ComparedRun",
    "ContextReport",
    "ContextStage",
    "ContextTrial",
    "CountedOperations",
    "Dataflow",
    "DeviceUse",
    "DividedBatches",
    "DriverCalls",
    "DryRun",
    "Equality",
    "Events",
    "Explanation",
    "FailedMalloc",
    "FedSamples",
    "FedTensor",
    "Figure",
    "Fragmentation",
    "Frame",
    "GpusFor",
    "GradientDifference",
    "GraphValue",
    "GroupBy",
    "Growth",
    "Hole",
    "JobRank",
    "Label",
    "LiveAllocation",
    "LoaderBatchSize",
    "LoaderScan",
    "LongestBatch",
    "Machine",
    "Mark",
    "MarkKind",
    "MaxBatch",
    "MeasuredBatch",
    "MeasuredPeak",
    "MemoryBaseline",
    "MemoryCheck",
    "MemoryPeak",
    "ModuleCall",
    "NcclMeasurement",
    "NcclStage",
    "Note",
    "Operation",
    "OperationCounts",
    "OptionPurpose",
    "OutOfMemory",
    "PeakRange",
    "Phase",
    "PhaseChange",
    "PinningBlock",
    "PlanRun",
    "Provenance",
    "RangeCause",
    "RankRole",
    "Replay",
    "ReservedBytes",
    "ReservedMemoryUse",
    "RowChange",
    "RunDifference",
    "Saved",
    "ScriptEnd",
    "ScriptLocation",
    "ScriptOption",
    "ScriptPlan",
    "Segment",
    "SettingOutcome",
    "Shortened",
    "SizeBound",
    "SnapshotBlock",
    "Stage",
    "StageUse",
    "StepOperations",
    "StrategyComparison",
    "TensorInfo",
    "Term",
    "Timeline",
    "Trace",
    "Untrained",
    "Verification",
    "VerificationVerdict",
    "can_run_again",
    "equality_of",
    "is_counted",
    "worst",
]
