"""Keep with each graph that Inductor compiles how much work its kernels do.

Inductor's scheduler knows that only until it has written the code, and a graph from the cache was never
scheduled. So it is kept in the graph itself, in plain tuples, and goes into memfit's cache with it.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.patching.patches import Patch

_GRAPH = Patch("torch._inductor.output_code:CompiledFxGraph", "__init__", why="keep the work of its kernels")

KERNELS = "memfit_kernels"
"""Attribute of a ``CompiledFxGraph``: name, floating-point operations, bytes moved, and the
dtype of the products, of each kernel."""
KernelWork = tuple[str, int, int, str]


def install() -> None:
    """Keep it from now on; call directly after torch was imported."""
    _GRAPH.wrap_when_imported(__init__=_note_kernels)


def _note_kernels(
    original: Any, compiled: Any, current_callable: Any, graph: Any, *args: Any, **options: Any
) -> None:
    original(compiled, current_callable, graph, *args, **options)
    setattr(compiled, KERNELS, _kernels(graph))


def _kernels(graph: Any) -> tuple[KernelWork, ...]:
    """Return the work of each kernel of a scheduled graph."""
    from torch._inductor.virtualized import V

    with V.set_graph_handler(graph):
        return tuple(_work(node) for node in graph.scheduler.nodes)


def _work(node: Any) -> KernelWork:
    """Return the work of one of the scheduler's nodes: a kernel that Inductor wrote, or one of a library."""
    moved = int(node.get_read_write_buffers_sizes())
    origins: list[Any] = []
    if moved and (node.is_extern() or node.is_template()):  # others do no products
        origins = [
            origin for part in node.get_nodes() if part.node is not None for origin in part.node.origins
        ]
    flops, dtype = _products(origins)
    return node.get_name(), flops, moved, dtype


def _products(origins: list[Any]) -> tuple[int, str]:
    """Return the floating-point operations of the products among some operations, and their dtype."""
    from torch._inductor.fx_utils import count_flops_fx, countable_fx

    found = [origin for origin in origins if countable_fx(origin)]
    results = [each for origin in found for each in tree_leaves(origin.meta.get("val"))]
    dtypes = [str(each.dtype).removeprefix("torch.") for each in results if isinstance(each, torch.Tensor)]
    return int(sum(count_flops_fx(origin) or 0 for origin in found)), dtypes[0] if dtypes else ""
