"""Compare memfit's aliases and lifetimes of the values of a graph with a real run.

    python benchmarks/aliases.py                          graphs of eight models, on the CPU
    python benchmarks/aliases.py --operators              graphs of PyTorch's operator database
    memfit dry-run --steps 9999 --memory 1TiB benchmarks/aliases.py --device cuda [--operators]
                                                          PyTorch's CUDA kernels, on the ghost

The benchmark runs each graph and inspects its storages (``tests/support/storage_referee.py``): which values
share a storage, its bytes, and the nodes between which it is live. All three must equal memfit's prediction.
The graphs of a model are forward and backward traced together, forward and backward as AOTAutograd passes
them to a compiler, and the exported forward. The graphs of an operator are a call, an in-place call, and the
decomposed forward with and without backward, each on dense tensors and on views into a larger storage.

--operators needs expecttest, which PyTorch's operator database imports (pip install expecttest).
"""

import copy
import itertools
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from measuring import ROOT, command_line
from packed_networks import model_of
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import memfit

sys.path.insert(0, str(ROOT / "tests"))
from support.captured_graphs import GPT2, Captured, every_kind, traced
from support.storage_referee import differences

IMAGES = {
    **dict.fromkeys(("resnet50", "resnet101", "vgg16", "googlenet", "densenet121", "mobilenet_v2"), 64),
    "vit_b_16": 224,
}
"""Model -> side of its square input, in pixels."""
GPT2_SIZES = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 1000, "n_positions": 64}
KNOWN = {
    "nn.functional.embedding_bag": "the CPU kernel allocates one more integer of bag offsets",
}
"""Operator -> a known difference that memfit does not predict."""


def main() -> int:
    """Compare, print the results, and return 1 if anything differs."""
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="*", choices=(*IMAGES, "gpt2"), default=(*IMAGES, "gpt2"))
    parser.add_argument("--operators", nargs="*", help="operators by name (default: all)")
    parser.add_argument("--samples", type=int, default=3, help="sample inputs per operator")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.operators is None:
        differing = sum(model(name, arguments.device) for name in arguments.models)
    else:
        warnings.simplefilter("ignore")  # PyTorch warns about its own samples
        differing = operators(set(arguments.operators), arguments.samples, arguments.device)
    print("every graph as predicted" if not differing else f"NOT AS PREDICTED: {differing} graphs")
    return bool(differing)


def model(name: str, device: str) -> int:
    """Check a model's graphs; return how many differ from the prediction."""
    if name == "gpt2":
        network: nn.Module = GPT2(**GPT2_SIZES)
        inputs = torch.zeros(2, GPT2_SIZES["n_positions"], dtype=torch.long, device=device)
    else:
        network = model_of(name)
        inputs = torch.zeros(2, 3, IMAGES[name], IMAGES[name], device=device)
    wrong = 0
    for graph in every_kind(network.to(device), torch.sum, inputs):
        begin = time.perf_counter()
        found = memfit.pack(graph.module)
        seconds = time.perf_counter() - begin
        differing = differences(graph.module, graph.inputs)
        print(
            f"{name:13} {graph.kind:9} {len(graph.module.graph.nodes):5} nodes {len(found.sets):5} sets  "
            f"unshared {found.unshared / found.live:6.3f}  planned {found.height / found.live:.4f} of "
            f"{found.live / 2**20:8.1f} MiB live  {seconds:5.1f} s  "
            f"{f'{len(differing)} DIFFER' if differing else 'as predicted'}",
            *differing,
            sep="\n    ",
            flush=True,
        )
        wrong += bool(differing)
    return wrong


def operators(names: set[str], samples: int, device: str) -> int:
    """Check operators; return how many graphs differ from the prediction."""
    from torch.testing._internal.common_methods_invocations import op_db

    ends: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for op in op_db:
        if torch.float32 not in op.dtypes or (names and op.name not in names):
            continue
        for graph in graphs_of(op, samples, device, ends):
            try:
                differing = differences(graph.module, graph.inputs)
            except memfit.MemfitError as error:
                ends["refused"] += 1
                refused[op.formatted_name] += 1
                if names:
                    print(error)
                continue
            end = "as predicted" if not differing else "known" if op.name in KNOWN else "NOT AS PREDICTED"
            ends[end] += 1
            if differing:
                print(
                    op.formatted_name,
                    graph.kind,
                    KNOWN.get(op.name, ""),
                    *differing,
                    sep="\n    ",
                    flush=True,
                )
    print("refused by name:", ", ".join(sorted(refused)))
    print(*(f"{count:6,} {end}" for end, count in sorted(ends.items())), sep="\n")
    return ends["NOT AS PREDICTED"]


def graphs_of(op: Any, samples: int, device: str, ends: Counter[str]) -> Iterator[Captured]:
    """Yield the operator's graphs that can be traced and run on this device."""
    for kind in ("call", "in place", "forward", "backward"):
        function = op.inplace_variant if kind == "in place" else op.op
        if function is None or (kind == "backward" and not op.supports_autograd):
            continue
        given = islice(op.sample_inputs(device, torch.float32, requires_grad=False), samples)
        for sample, dense in itertools.product(given, (True, False)):
            try:
                parts = sample.input, sample.args, sample.kwargs
                graph = _graph(function, parts if dense else tree_map(_with_gaps, parts), kind)
                with torch.no_grad():
                    fx.Interpreter(graph.module).run(*copy.deepcopy(graph.inputs))
            except Exception:  # noqa: BLE001 - some samples cannot be traced, or written to
                ends["cannot be traced or run"] += 1
                continue
            yield graph


def _with_gaps(value: Any) -> Any:
    """Return the value; a dense tensor becomes a view into a larger one."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.dim():
        return value
    wide = value.new_zeros((*value.shape[:-1], value.shape[-1] + 2))
    return wide.narrow(-1, 1, value.shape[-1]).copy_(value)


def _graph(function: Callable[..., Any], sample: tuple[Any, ...], kind: str) -> Captured:
    leaves, spec = tree_flatten(sample)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[place].detach() for place in places]

    def call(given: list[Any]) -> tuple[Any, ...]:
        """Return the arguments of a call, with ``given`` in place of the sample's tensors."""
        with_them = dict(zip(places, given, strict=True))
        first, others, keywords = tree_unflatten(
            [with_them.get(place, leaf) for place, leaf in enumerate(leaves)], spec
        )
        return (first, *others), keywords

    if kind in ("call", "in place"):
        graph = fx.Graph()
        inputs = [graph.placeholder(f"x{number}") for number in range(len(tensors))]
        for node, tensor in zip(inputs, tensors, strict=True):
            node.meta["val"] = tensor
        graph.output(graph.call_function(function, *call(inputs)))
        return Captured(kind, fx.GraphModule({}, graph), [node.meta["val"] for node in inputs])

    def run(*given: torch.Tensor) -> Any:
        backward = kind == "backward"
        inputs = [one.detach().requires_grad_(backward and one.is_floating_point()) for one in given]
        arguments, keywords = call(inputs)
        result = function(*arguments, **keywords)
        if not backward:
            return result
        outputs = [one.sum() for one in tree_leaves(result) if getattr(one, "requires_grad", False)]
        wanted = [one for one in inputs if one.requires_grad]
        return result, torch.autograd.grad(outputs, wanted, allow_unused=True)

    found = traced(run, *tensors)
    for node, tensor in zip(found.module.graph.nodes, tensors, strict=False):
        node.meta["val"] = tensor  # tracing loses the size of the tensor's storage
    return found._replace(kind=kind)


if __name__ == "__main__":
    raise SystemExit(main())
