"""What to change about a script that stays as it is: in a search, in its process, and in a plan's file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from memfit.records.own_sharding import CallOptions, offloads_shards
from memfit.records.script_options import LoaderBatchSize


class Equality(StrEnum):
    """How near the results under a plan are to those of the script as written."""

    BITWISE = "bit for bit"
    """The same results, bit for bit."""
    ROUNDING = "up to rounding"
    """The same sums, taken in another order, or rounded at other places."""
    OTHER = "other numerics"
    """Values of other precision."""


@dataclass(frozen=True, slots=True)
class DividedBatches:
    """Batches in equal parts: each part has a forward and a backward, and an update sums their gradients."""

    count: int
    """Parts of a batch."""
    size: int
    """Samples in each."""
    how: str = field(compare=False)
    """What to write: ``--batch-size 2, now 4``."""
    where: str = field(compare=False)
    """``file:line`` of it, if known."""
    arguments: tuple[str, ...] = ()
    """Options of the script's own that set the size."""
    loader: LoaderBatchSize | None = None
    """The loader to be created with this size."""
    draws: bool = field(default=False, compare=False)
    """Whether the step draws random numbers: other ones than for the whole batch."""
    assumed: str = field(default="", compare=False)
    """On which condition, which memfit has not seen, the parts have the samples of the batch, and why it has
    not; empty if it has."""
    dim: int | None = field(default=None, compare=False)
    """Along which dimension of the model's inputs samples lie; None if that is not known."""
    by_option: bool = False
    """Whether the script's own options sum the gradients, too: nothing is to be changed in its loop."""
    by_engine: bool = False
    """Whether ``memfit.Engine`` divides batches, as for a ``memfit.Job``."""

    @property
    def by_hand(self) -> bool:
        """Whether the script's loop is to be changed for it."""
        return not self.by_option and not self.by_engine

    @property
    def in_loop(self) -> tuple[str, ...]:
        """What to write besides, so that an update sums the gradients of all parts."""
        if self.by_option:
            return ()
        if self.loader is not None and self.loader.library:
            return (
                f"gradient accumulation over {self.count} batches, by a setting of {self.loader.library}",
            )
        return (
            f"loss = loss / {self.count}",
            f"if (step + 1) % {self.count} == 0:  # clip, optimizer.step(), zero_grad()",
        )


@dataclass(frozen=True, slots=True)
class Change:
    """What to change about a script, or several such changes made together with ``|``.

    The first fields are those of a plan's file. Two changes are equal if the script then does the same,
    whatever they say about it.

    >>> both = Change({"checkpointing": {}}, words=("checkpointed",)) | Change(fused=True)
    >>> both == Change({"checkpointing": {}}, fused=True), both.words
    (True, ('checkpointed',))
    """

    plan: Mapping[str, Any] = field(default_factory=dict)
    """The settings of a ``memfit.Plan``, by its fields; as in JSON."""
    allocator: str = ""
    """``PYTORCH_ALLOC_CONF``; empty for the script's own. A replay applies it, or the environment has it."""
    micro_batches: DividedBatches | None = None
    """How batches are divided; None if they stay whole."""
    fused: bool = False
    """Whether PyTorch's optimizers use ``fused=True`` if the script does not choose an implementation."""
    own_sharding: Mapping[str, CallOptions] = field(default_factory=dict)
    """By call with which the script shards itself, such as ``fully_shard``: arguments in place of its own."""
    optimizer: int | None = None
    """Only models of this optimizer, counted from 0 as they are created, get the plan; None for all."""
    arguments: tuple[str, ...] = ()
    """Options of the script's own, to be written after its arguments; those that divide batches included."""
    loader: LoaderBatchSize | None = None
    """The batch size that loaders created at its line get; None to leave them alone."""
    eager: bool = False
    """Whether ``torch.compile`` does nothing: the script runs as if it did not call it."""
    operations: bool = False
    """Whether the operations of a training step are recorded, which changes nothing for the script."""
    finish_late: bool = False
    """Whether GPU work on side streams finishes as late as its order allows."""
    batch_size: int = field(default=0, compare=False)
    """Samples in a batch, if that changes."""
    words: tuple[str, ...] = field(default=(), compare=False)
    """What it does, for the user."""
    how: tuple[str, ...] = field(default=(), compare=False)
    """What to write, besides the call of ``memfit.apply`` that makes all strategies."""
    where: str = field(default="", compare=False)
    """``file:line`` to be changed, if known."""
    costs: str = field(default="", compare=False)
    """Empty if only runs tell."""

    def __hash__(self) -> int:
        """Return the same for changes that are equal; their settings are compared, not hashed."""
        return hash((*self.plan, self.allocator, self.micro_batches, self.arguments, self.loader))

    def __or__(self, other: "Change") -> "Change":
        """Return both changes together; where they contradict each other, the other counts."""
        return Change(
            plan={**self.plan, **other.plan},
            allocator=other.allocator or self.allocator,
            micro_batches=other.micro_batches or self.micro_batches,
            fused=self.fused or other.fused,
            own_sharding={
                call: {**self.own_sharding.get(call, {}), **other.own_sharding.get(call, {})}
                for call in (*self.own_sharding, *other.own_sharding)
            },
            optimizer=self.optimizer if other.optimizer is None else other.optimizer,
            arguments=self.arguments + other.arguments,
            loader=other.loader or self.loader,
            eager=self.eager or other.eager,
            operations=self.operations or other.operations,
            finish_late=self.finish_late or other.finish_late,
            batch_size=other.batch_size or self.batch_size,
            words=self.words + other.words,
            how=self.how + other.how,
            where=self.where or other.where,
            costs="; ".join(filter(None, (self.costs, other.costs))),
        )

    @property
    def strategies(self) -> dict[str, Any]:
        """What of ``plan`` ``memfit.apply`` carries out: micro-batches are made by holding updates back."""
        divided = self.micro_batches is not None
        return {name: given for name, given in self.plan.items() if name != "accumulation" or not divided}

    @property
    def is_late(self) -> bool:
        """Whether its strategies change nothing before a model is called.

        >>> [Change({"precision": {"autocast": each}}).is_late for each in (True, False)]
        [True, False]
        """
        casts = not self.strategies.get("precision", {}).get("autocast", True)
        return not casts and all(traits_of_strategy(name).is_late for name in self.strategies)

    @property
    def parts(self) -> int:
        """Micro-batches of a batch."""
        return 1 if self.micro_batches is None else self.micro_batches.count

    @property
    def updates_held_back(self) -> int:
        """Of so many updates of the script, only the last is made, with the gradients of all."""
        return 1 if self.micro_batches is None or self.micro_batches.by_option else self.micro_batches.count

    @property
    def uses_side_streams(self) -> bool:
        """Whether it copies on side streams, so that a run must finish that work as late as possible."""
        return "offload" in self.plan or "offload" in self.plan.get("optimizer_state", {})

    @property
    def code(self) -> tuple[str, ...]:
        """The Python expressions that create its strategies.

        >>> Change({"sharding": {"mode": "fsdp2", "offload": True}}).code
        ("memfit.Sharding(mode='fsdp2', offload=True)",)
        """
        return tuple(
            f"memfit.{''.join(map(str.capitalize, name.split('_')))}"
            f"({', '.join(f'{key}={value!r}' for key, value in given.items())})"
            for name, given in sorted(self.strategies.items())
        )


@dataclass(frozen=True, slots=True)
class StrategyTraits:
    """What holds of a strategy whatever its settings are, but for what ``equality_of`` says."""

    equality: Equality
    """How near the results under it are to those of the script as written."""
    is_late: bool
    """Whether it changes nothing before a model is called; of a precision, whether autocast does not."""
    is_in_model: bool
    """Whether ``memfit.apply`` carries it out."""


STRATEGY_TRAITS: Mapping[str, StrategyTraits] = {
    "precision": StrategyTraits(Equality.OTHER, is_late=True, is_in_model=True),
    "optimizer_state": StrategyTraits(Equality.BITWISE, is_late=True, is_in_model=True),
    "checkpointing": StrategyTraits(Equality.BITWISE, is_late=True, is_in_model=True),
    "offload": StrategyTraits(Equality.BITWISE, is_late=True, is_in_model=True),
    "sharding": StrategyTraits(Equality.BITWISE, is_late=False, is_in_model=True),
    "accumulation": StrategyTraits(Equality.ROUNDING, is_late=False, is_in_model=False),
    "compilation": StrategyTraits(Equality.ROUNDING, is_late=True, is_in_model=True),
    "batch_slices": StrategyTraits(Equality.ROUNDING, is_late=True, is_in_model=True),
}
"""The fields of a ``memfit.Plan``."""
_UNKNOWN = StrategyTraits(Equality.OTHER, is_late=False, is_in_model=False)


def traits_of_strategy(name: str) -> StrategyTraits:
    """Return what holds of a field of a plan; of one that memfit does not know, nothing is promised."""
    return STRATEGY_TRAITS.get(name, _UNKNOWN)


_OF_OPTIMIZER = {"offload", "step_in_backward"}
"""Fields of ``optimizer_state`` under which results are the same, bit for bit."""


def equality_of(change: Change, *, compiled: bool = False) -> Equality:
    """Return what training under a change computes, compared with the script as written.

    Args:
        change: the change.
        compiled: whether ``torch.compile`` compiles the script's code. What changes its graphs changes their
            kernels.

    >>> str(equality_of(Change({"optimizer_state": {"offload": True}})))
    'bit for bit'
    """
    plan = change.plan
    optimizer = plan.get("optimizer_state", {}).keys()
    equalities = {traits_of_strategy(name).equality for name in plan}
    if Equality.OTHER in equalities or "bits" in optimizer:
        return Equality.OTHER
    in_parts = plan.get("sharding", {}).get("mode") == "fsdp2"  # its ranks sum gradients in parts
    exact = Equality.ROUNDING not in equalities and optimizer <= _OF_OPTIMIZER and not in_parts
    rounds = change.micro_batches is not None or change.fused or (compiled and bool(plan))
    rounds = rounds or any(map(offloads_shards, change.own_sharding.values()))  # the CPU updates them
    return Equality.BITWISE if exact and not rounds else Equality.ROUNDING
