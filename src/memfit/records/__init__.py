"""The records that stages exchange; nothing here computes anything.

Device ─┐
ghost, run, recording ─────┴─> Trace ──> Timeline ──> DryRun ──> report
events     bytes        the answer
+ tables   per event
"""

from memfit.records.allocator_comparison import (
    AllocatorComparison,
    AllocatorSetting,
    DriverCalls,
    FailedMalloc,
    ReplayResult,
    SecondsPerDriverCall,
    SettingOutcome,
)
from memfit.records.attributed_allocations import Attribution
from memfit.records.baseline_check import CheckedFigure, CheckVerdict, MemoryBaseline, MemoryCheck
from memfit.records.card_context import (
    CardContextReport,
    CardContextStage,
    CardContextTrial,
    ProcessMemory,
)
from memfit.records.dry_run import (
    Advice,
    ByteRange,
    DryRun,
    EquivalentRanks,
    Growth,
    OutOfMemory,
    PeakRange,
    RangeCause,
    SizeBound,
    Stage,
    StageUse,
    Term,
)
from memfit.records.environment_check import EnvironmentCheck
from memfit.records.event_marks import Mark, MarkKind, SaveKind, UntrainedForwardReason
from memfit.records.explanation import (
    Breakdown,
    BreakdownRow,
    Explanation,
    GroupBy,
    HighMemoryMoment,
    LiveAllocation,
    PhaseMemoryChange,
    RowChange,
    RunDifference,
)
from memfit.records.fragmentation import Fragmentation, Hole, PinningBlock, ReservedBytes, ReservedMemoryUse
from memfit.records.graph_dataflow import Dataflow, GraphValue
from memfit.records.host_times import ASSUMED_HOST_TIMES, MEASURED_OF_HOST, HostTimes, HostUnits
from memfit.records.kernel_measurement import KernelMeasurement, TimedKernel
from memfit.records.loader_batches_and_peaks import BatchSize, LoaderScan, MeasuredBatch, PeakByBatchSize
from memfit.records.max_batch import BatchLimit, BatchRun, MaxBatch
from memfit.records.own_sharding import OWN_SHARDINGS, OwnSharding, ShardingCalls
from memfit.records.plan_search_result import GpusFor, PlanRun, ScriptPlan
from memfit.records.printable_result import SCHEMA_VERSION
from memfit.records.provenance import Figure, Note, Provenance, worst_provenance
from memfit.records.script_change import (
    STRATEGY_TRAITS,
    Change,
    DividedBatches,
    Equality,
    equality_of,
    traits_of_strategy,
)
from memfit.records.script_end import CHECK, FINITE_CHECK, ScriptEnd, StandIn
from memfit.records.script_options import LoaderBatchSize, ScriptOption, ScriptOptionPurpose
from memfit.records.step_operations import (
    DRIVER,
    EVERY_STREAM,
    LEAST_RECOMPUTED,
    NO_STREAM,
    ON_CPU,
    InputTensor,
    ModuleCall,
    Operand,
    Operation,
    OperationCounts,
    StepInputs,
    StepOperations,
    is_counted_operation,
    is_recomputable_operation,
)
from memfit.records.step_time import CommunicationTime, StepTime, TimeShare
from memfit.records.strategy_comparison import ComparedRun, StrategyComparison
from memfit.records.trace import (
    ARENA,
    DEFAULT_POOL,
    Action,
    Category,
    ChildProcess,
    DeviceUse,
    EventLabel,
    Events,
    Frame,
    JobRank,
    MachineKind,
    Phase,
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
    GradientComparison,
    MeasuredPeak,
    Verification,
    VerificationVerdict,
)
from memfit.records.whole_step import WholeStep
