"""Keep with each graph that Inductor compiles what its kernels work on.

Inductor's scheduler knows that only until it has written the code, and a graph from the cache was never
scheduled. So it is kept in the graph itself, in plain tuples, and goes into memfit's cache with it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.patching.patches import Patch

_GRAPH = Patch("torch._inductor.output_code:CompiledFxGraph", "__init__", why="keep the work of its kernels")

KERNELS = "memfit_kernel_work"
"""Attribute of a ``CompiledFxGraph``: of each kernel, ``KernelWork``."""
PlainTensor = tuple[tuple[int, ...], tuple[int, ...], str]
"""Sizes, strides, and the dtype."""
KernelWork = tuple[str, int, int, str, tuple[PlainTensor, ...], tuple[PlainTensor, ...], bool]
"""Name, floating-point operations, bytes moved, and the dtype of the products. Of a kernel of a library, the
name is the operation's, ``aten.mm.default``, and there are its operands, its results, and whether it is a
causal attention; what Inductor wrote has none. Embeddings that are part of kernels come first, and move
nothing: their operands say how many tokens there are."""
_MOVED = 2
_EMBEDDING = "aten.embedding.default"


def keep_kernel_work_in_graphs() -> None:
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
        found = [*_embeddings(graph.scheduler.nodes), *map(_work, graph.scheduler.nodes)]
    # Others launch nothing: they name a kernel's results.
    return tuple(work for work in found if work[_MOVED] or work[0] == _EMBEDDING)


def _embeddings(nodes: Iterable[Any]) -> Iterator[KernelWork]:
    """Yield the embeddings that are part of kernels, each once: several kernels may compute one."""
    parts = (part for node in nodes for part in node.get_nodes())
    for origin in dict.fromkeys(each for part in parts for each in getattr(part.node, "origins", ())):
        if str(origin.target) == _EMBEDDING:
            operands = tuple(_tensors([each.meta["val"] for each in origin.args[:2]]))
            yield _EMBEDDING, 0, 0, operands[0][-1], operands, tuple(_tensors(origin.meta["val"])), False


def _work(node: Any) -> KernelWork:
    """Return the work of one of the scheduler's nodes: a kernel that Inductor wrote, or one of a library."""
    moved = int(node.get_read_write_buffers_sizes())
    written = node.get_name(), 0, moved, "", (), (), False
    if not moved or not (node.is_extern() or node.is_template()):  # others do no products
        return written
    kernel = node.get_template_node() if node.is_template() else node.node
    origin = _origin(kernel)
    if origin is None:  # a kernel of the user's, in Triton
        return written
    operands = tuple(_tensors(kernel.inputs))
    results = tuple(_tensors([kernel])) or tuple(_tensors(origin.meta.get("val")))
    dtype = (results or operands or (written[:4],))[0][-1]
    return str(origin.target), _flops(origin), moved, dtype, operands, results, _is_causal(origin)


def _origin(kernel: Any) -> Any:
    """Return the operation that a kernel computes; None if it is not one of PyTorch's."""
    from torch._inductor.fx_utils import countable_fx

    called = getattr(kernel, "op_overload", None)
    found = [each for each in kernel.origins if each.target is called or countable_fx(each)]
    return found[0] if found else None


def _flops(origin: Any) -> int:
    from torch._inductor.fx_utils import count_flops_fx

    return int(count_flops_fx(origin) or 0)


def _is_causal(origin: Any) -> bool:
    """Return whether an operation is an attention to earlier positions only."""
    schema = getattr(origin.target, "_schema", None)
    arguments = [each.name for each in schema.arguments] if schema is not None else []
    given = dict(zip(arguments, origin.args, strict=False)) | origin.kwargs
    return given.get("is_causal") is True


def _tensors(nested: Any) -> Iterator[PlainTensor]:
    """Yield the tensors among Inductor's nodes, or among what PyTorch's operations return."""
    for each in tree_leaves(nested):
        if isinstance(each, torch.Tensor):
            yield _plain(each.shape), _plain(each.stride()), str(each.dtype).removeprefix("torch.")
        elif (size := _of(each, "size")) is not None and (stride := _of(each, "stride")) is not None:
            yield _plain(size), _plain(stride), str(each.get_dtype()).removeprefix("torch.")


def _of(node: Any, what: str) -> Any:
    """Return what a node has of a tensor; None if it is none, or several."""
    return getattr(node, f"maybe_get_{what}", lambda: None)()


def _plain(sizes: Iterable[Any]) -> tuple[int, ...]:
    """Return sizes as numbers: of those that may change, as they were when the graph was compiled."""
    from torch._inductor.virtualized import V

    known: Any = V.graph.sizevars
    number = known.optimization_hint if hasattr(known, "optimization_hint") else known.size_hint  # until 2.11
    return tuple(int(number(each.node.expr if isinstance(each, torch.SymInt) else each)) for each in sizes)
