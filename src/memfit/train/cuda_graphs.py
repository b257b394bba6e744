"""A step as two CUDA graphs, for models whose kernels take less time than their launches.

    warm-up       3 batches without graphs, on a side stream, to allocate everything that persists
    accumulate    micro-batch, copied into place -> forward -> loss -> backward: added to the gradients
    update        the optimizer's step

The rest of a step (clipping, zeroing gradients, weighting and counting) is not captured. A micro-batch of
other shapes runs without a graph, on the same gradients; so does an update whose hyperparameters differ from
the graph's. Gradients stay allocated from one step to the next.

Source: the rules of capture, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs (2.14).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from memfit.errors import UsageError
from memfit.recording.optimizer_accessors import parameters_of

WARM_UP = 3
Capture = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Captures a function without running it; returns a function that replays it, and its result tensor."""


class CudaGraphCapture:
    """Captures into CUDA graphs that share a memory pool."""

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
        """Run on the stream used for capture, in order with the current stream."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)


@dataclass(frozen=True, slots=True)
class _AccumulateGraph:
    kind: object
    inputs: list[Any]
    replay: Callable[[], None]
    loss: torch.Tensor


class StepCudaGraphs:
    """The two graphs of an engine, captured after its warm-up.

    Args:
        optimizer: one that can be captured, see ``prepare_step_cuda_graphs``.
        capture: captures work into a graph.
        warming: the context in which warm-up steps run.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, capture: Capture, warming: Any) -> None:
        self._optimizer, self._capture, self._warming = optimizer, capture, warming
        self._done = 0
        self._updated: list[torch.nn.Parameter] = []
        self._accumulate: _AccumulateGraph | None = None
        self._update: tuple[object, Callable[[], None]] | None = None  # hyperparameters and graph

    @property
    def warm(self) -> bool:
        """Whether the warm-up is over and graphs are in use."""
        return self._done >= WARM_UP

    @contextmanager
    def window(self) -> Iterator[None]:
        """Return the context of a window: the side stream during warm-up."""
        if self.warm:
            yield
            return
        with self._warming():
            yield
        self._done += 1

    def accumulate(
        self, backward: Callable[[Any], torch.Tensor], part: Any, divisor: float
    ) -> torch.Tensor | None:
        """Replay the graph to add a micro-batch's gradients; return its loss, overwritten by the next.

        Args:
            backward: runs forward and backward of a micro-batch, and returns its mean loss.
            part: the micro-batch.
            divisor: of its loss; a graph has a fixed one.

        Returns:
            None if it must run without a graph: during warm-up, or if the graph has other shapes.
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
            self._accumulate = _AccumulateGraph(kind, inputs, replay, loss)
        graph = self._accumulate
        if graph.kind != kind:
            return None
        for target, leaf in zip(graph.inputs, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                target.copy_(leaf, non_blocking=True)
        graph.replay()
        return graph.loss

    def step(self) -> None:
        """Step the optimizer, by the graph if its hyperparameters are those captured."""
        if not self.warm:
            self._updated = [
                parameter for parameter in parameters_of(self._optimizer) if parameter.grad is not None
            ]
            self._optimizer.step()
            return
        settings = _settings(self._optimizer)
        if self._update is None:
            replay, _ = self._capture(self._optimizer.step)
            self._update = settings, replay
        captured, replay = self._update
        if captured == settings:
            replay()
        else:
            self._optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients; once the graphs refer to them, zero them in place."""
        if self.warm:
            torch._foreach_zero_(_gradients(self._optimizer))
        else:
            self._optimizer.zero_grad(set_to_none=True)

    def reset(self) -> None:
        """Drop the graphs and warm up again: the tensors that they refer to were replaced."""
        self._done, self._accumulate, self._update = 0, None, None
        self._optimizer.zero_grad(set_to_none=True)

    def _have_gradients(self) -> None:
        """Allocate gradients for the graphs, for parameters that had some: no others are updated."""
        for parameter in self._updated:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def prepare_step_cuda_graphs(optimizer: torch.optim.Optimizer) -> StepCudaGraphs:
    """Return an engine's graphs, and make its optimizer capturable: its learning rates become tensors.

    Raises:
        UsageError: parameters are not on a GPU, or the optimizer has no capturable implementation.
    """
    device = next(parameters_of(optimizer)).device
    if device.type != "cuda":
        raise UsageError(f"cuda_graphs needs parameters on a GPU; here they are on the {device.type}.")
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        elif not isinstance(optimizer, torch.optim.SGD):
            raise UsageError(
                f"cuda_graphs: {type(optimizer).__name__} has no capturable implementation. Use Adam, AdamW, "
                "RMSprop or SGD."
            )
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(parameter.device)
    capture = CudaGraphCapture()
    return StepCudaGraphs(optimizer, capture, capture.warming)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return leaf


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the hyperparameters that a graph holds as constants."""
    return [
        {
            name: value
            for name, value in group.items()
            if name != "params" and not isinstance(value, torch.Tensor)
        }
        for group in optimizer.param_groups
    ]
