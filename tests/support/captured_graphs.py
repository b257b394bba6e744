"""Graphs of a model as PyTorch captures them, each with inputs to run it on, for tests of alias sets."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from functorch.compile import aot_function, make_boxed_func
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves


class Captured(NamedTuple):
    """A graph, and inputs to run it on."""

    kind: str
    module: fx.GraphModule
    inputs: list[Any]


def traced(function: Callable[..., Any], *inputs: Any) -> Captured:
    """Trace a function unchanged: views stay views, and in-place operations stay in place."""
    return Captured("traced", make_fx(function)(*inputs), tree_leaves(inputs))


def training(model: nn.Module, loss: Callable[[Any], torch.Tensor], *inputs: torch.Tensor) -> Captured:
    """Trace forward and backward as one graph."""
    forward = _as_function(model)

    def step(parameters: Any, buffers: Any, *inputs: torch.Tensor) -> Any:
        output = forward(parameters, buffers, *inputs)
        return torch.autograd.grad(loss(output), list(parameters.values()), allow_unused=True)

    return traced(step, *_state(model), *inputs)._replace(kind="training")


def exported(model: nn.Module, *inputs: torch.Tensor) -> Captured:
    """Export the forward for inference, with the operators below autograd."""
    with torch.no_grad():
        program = torch.export.export(model.eval(), inputs).run_decompositions({})
    state = [program.state_dict.get(name, program.constants.get(name)) for name in _targets(program)]
    return Captured("exported", program.graph_module, [*state, *inputs])


def compiled(
    model: nn.Module, loss: Callable[[Any], torch.Tensor], *inputs: torch.Tensor
) -> Iterator[Captured]:
    """Capture the forward and backward that AOTAutograd passes to a compiler, without in-place operations."""
    found = []

    def keep(kind: str) -> Callable[..., Any]:
        def compiler(module: fx.GraphModule, _examples: Any) -> Any:
            def run(*inputs: Any) -> Any:
                found.append(Captured(kind, module, list(inputs)))
                return module(*inputs)

            return make_boxed_func(run)

        return compiler

    loss(
        aot_function(_as_function(model), keep("forward"), keep("backward"))(*_state(model), *inputs)
    ).backward()
    yield from found


def every_kind(
    model: nn.Module, loss: Callable[[Any], torch.Tensor], *inputs: torch.Tensor
) -> Iterator[Captured]:
    """Capture the model in every way, one after the other."""
    yield training(model.train(), loss, *inputs)
    yield from compiled(model, loss, *inputs)
    yield exported(model, *inputs)


class GPT2(nn.Module):
    """GPT-2 of transformers, from tokens to logits."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.model(tokens).logits


def _state(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(model.named_parameters()), dict(model.named_buffers())


def _as_function(model: nn.Module) -> Callable[..., Any]:
    return lambda parameters, buffers, *inputs: torch.func.functional_call(
        model, (parameters, buffers), inputs
    )


def _targets(program: torch.export.ExportedProgram) -> list[str]:
    """Return the names of the parameters, buffers and constants that a program takes before its inputs."""
    specs = program.graph_signature.input_specs
    return [spec.target for spec in specs if spec.target is not None]
