"""Compare memfit's compiled allocator with PyTorch's, as ``model.py`` does for the reference in Python."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from memfit.allocator import compiled_allocator
from memfit.allocator.compiled_allocator import COUNTERS, NAMES, CompiledAllocator
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.requests import AllocatorRequests, RequestKind
from support.allocator_comparison.model import (
    BY_STEPS,
    DifferenceError,
    Kind,
    Log,
    Operation,
    Piece,
    Situation,
    compare_pieces,
)


class CompiledModel:
    """The compiled allocator in a situation; ``compiled_model`` creates it."""

    def __init__(self, allocator: CompiledAllocator, situation: Situation) -> None:
        self._allocator = allocator
        self._situation = situation
        self._held = False

    def do(self, operation: Operation, address: int, figures: Sequence[int]) -> None:
        """Repeat an operation, as ``Model.do`` does, but compare every statistic at once."""
        requests, number = AllocatorRequests(), operation.number
        stream = self._situation.streams[operation.stream]
        if operation.kind == Kind.ALLOCATE:
            requests.add(RequestKind.MALLOC, 0, number, operation.size, stream, operation.pool + 1)
        elif operation.kind == Kind.FREE:
            requests.add(RequestKind.FREE, 0, number)
        elif operation.kind == Kind.USE:
            requests.add(RequestKind.USE, 0, number, stream=stream)
        elif operation.kind == Kind.HOLD:
            self._held = not self._held
        else:
            requests.add(RequestKind.EMPTY_CACHE, 0)
        self._allocator.serve(requests)
        if not self._held:
            completion = AllocatorRequests()
            completion.add(RequestKind.ALL_GONE_ON, 0)
            self._allocator.serve(completion)
        if operation.kind == Kind.ALLOCATE and self._allocator.address(number) != address:
            raise DifferenceError(f"address {address:#x}, compiled {self._allocator.address(number):#x}")
        self._compare(figures)

    def _compare(self, figures: Sequence[int]) -> None:
        mine = self._allocator.figures()
        if mine == list(figures):
            return
        for column, (real, own) in enumerate(zip(figures, mine, strict=True)):
            if real != own and not (self._situation.shares and column in BY_STEPS):
                raise DifferenceError(f"{(*NAMES, *COUNTERS)[column]} is {real:,}, compiled {own:,}")

    def finish(self, pieces: list[Piece]) -> None:
        """Compare every block of every segment.

        Raises:
            DifferenceError: a block or segment differs.
        """
        compare_pieces(pieces, self._allocator.snapshot())


def replay_compiled(log: Log) -> None:
    """Repeat a log's operations with the compiled allocator.

    Raises:
        DifferenceError: a result differs from the real allocator's.
    """
    with compiled_model(log.situation, 1 + max(operation.number for operation in log.operations)) as model:
        log.replay(model)


@contextmanager
def compiled_model(situation: Situation, numbers: int) -> Iterator[CompiledModel]:
    """Create a compiled allocator for operations whose block numbers are below ``numbers``."""
    config = AllocatorConfig.of(situation.conf)
    if situation.fraction is not None:
        config = replace(config, per_process_memory_fraction=situation.fraction)
    with compiled_allocator.open_compiled_allocator(
        config,
        blocks=numbers,
        pools=[(0, 0), *situation.pools],
        total=situation.total,
        taken=0,
        version=situation.version,
    ) as allocator:
        yield CompiledModel(allocator, situation)
