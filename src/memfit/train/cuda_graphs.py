"""A step as two CUDA graphs, where asking for kernels takes longer than they do.

    warm-up       3 batches as usual, on a side stream, so that all that lives on is allocated
    accumulate    micro-batch, copied into place -> forward -> loss -> backward: added to the gradients
    update        the optimizer's step

What lies between (clipping, zeroing gradients, what is weighed and counted) stays as it is. A micro-batch of
other shapes goes as usual, on the same gradients; so does an update whose hyperparameters are not those of
the graph. Gradients stay allocated from one step to the next.

Source: the rules of capturing, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs (2.14).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from memfit.errors import UsageError
from memfit.strategies.mechanisms.optimizer_info import parameters_of

WARM_UP = 3
Capture = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Notes a function's work without doing it; returns what does it, and where its result will be."""


class CudaCapture:
    """Captures into CUDA graphs that share a pool."""

    def __init__(self) -> None:
        self._pool: Any = None
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture a function."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream):
            result = function()
        self._pool = graph.pool()
        return graph.replay, result

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Work on the stream that is captured later, in order with the one that is current."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)


@dataclass(frozen=True, slots=True)
class _Accumulate:
    kind: object
    inputs: list[Any]
    replay: Callable[[], None]
    loss: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Update:
    settings: object
    replay: Callable[[], None]


class Graphs:
    """The two graphs of an engine, captured when it is warm.

    Args:
        optimizer: is made capturable; its learning rates become tensors, so that a scheduler may change them.
        capture: how work is captured.

    Raises:
        UsageError: its parameters are not on a GPU, or it cannot be captured.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, capture: Capture, warming: Any) -> None:
        self._optimizer, self._capture, self._warming = optimizer, capture, warming
        self._done = 0
        self._updated: list[torch.nn.Parameter] = []
        self._accumulate: _Accumulate | None = None
        self._update: _Update | None = None

    @property
    def warm(self) -> bool:
        """Whether graphs are in use."""
        return self._done >= WARM_UP

    @contextmanager
    def window(self) -> Iterator[None]:
        """Go through a window: on the side stream, as long as the engine warms up."""
        if self.warm:
            yield
            return
        with self._warming():
            yield
        self._done += 1

    def accumulate(
        self, backward: Callable[[Any], torch.Tensor], part: Any, divisor: float
    ) -> torch.Tensor | None:
        """Add a micro-batch's gradients by the graph; return its loss, which the next one overwrites.

        Args:
            backward: forward and backward of a micro-batch, that returns its mean loss.
            part: the micro-batch.
            divisor: of its loss; a graph has one.

        Returns:
            None if it is to go as usual: the engine is not warm, or the graph is of other micro-batches.
        """
        if not self.warm:
            return None
        leaves, tree = _pytree.tree_flatten(part)
        kind = (tree, divisor, tuple(_kind(leaf) for leaf in leaves))
        if self._accumulate is None:
            self._have_gradients()
            inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            static = _pytree.tree_unflatten(inputs, tree)
            replay, loss = self._capture(lambda: backward(static))
            self._accumulate = _Accumulate(kind, inputs, replay, loss)
        graph = self._accumulate
        if graph.kind != kind:
            return None
        for place, leaf in zip(graph.inputs, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                place.copy_(leaf, non_blocking=True)
        graph.replay()
        return graph.loss

    def step(self) -> None:
        """Step the optimizer, by the graph if it is as it was captured."""
        if not self.warm:
            self._updated = [one for one in parameters_of(self._optimizer) if one.grad is not None]
            self._optimizer.step()
            return
        settings = _settings(self._optimizer)
        if self._update is None:
            replay, _ = self._capture(self._optimizer.step)
            self._update = _Update(settings, replay)
        if self._update.settings == settings:
            self._update.replay()
        else:
            self._optimizer.step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Zero the gradients where they are, once there are graphs that know where."""
        if self.warm:
            torch._foreach_zero_(_gradients(self._optimizer))
        else:
            self._optimizer.zero_grad(set_to_none=set_to_none)

    def reset(self) -> None:
        """Forget the graphs, and warm up again: what they work on was replaced."""
        self._done, self._accumulate, self._update = 0, None, None
        self._optimizer.zero_grad(set_to_none=True)

    def _have_gradients(self) -> None:
        """Allocate what the graphs add to, for the parameters that had gradients: no others are updated."""
        for parameter in self._updated:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def graphs(optimizer: torch.optim.Optimizer) -> Graphs:
    """Return an engine's graphs; its optimizer is made ready for them.

    Raises:
        UsageError: parameters are not on a GPU, or the optimizer has no capturable implementation.
    """
    device = next(parameters_of(optimizer)).device
    if device.type != "cuda":
        raise UsageError(f"cuda_graphs need parameters on a GPU, and here they are on the {device.type}.")
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        elif not isinstance(optimizer, torch.optim.SGD):
            raise UsageError(
                f"cuda_graphs: {type(optimizer).__name__} has no capturable implementation; Adam, AdamW, "
                "RMSprop and SGD have."
            )
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(parameter.device)
    capture = CudaCapture()
    return Graphs(optimizer, capture, capture.warming)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return leaf


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what a graph has of the optimizer as constants."""
    return [
        {
            name: value
            for name, value in group.items()
            if name != "params" and not isinstance(value, torch.Tensor)
        }
        for group in optimizer.param_groups
    ]
