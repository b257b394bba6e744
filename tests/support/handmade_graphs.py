"""Graphs written by hand: calls on numbered values, and a small model with in-place operations."""

import torch
from torch import fx
from torch.nn import functional as F  # noqa: N812


def graph_of(*calls, inputs=2, returns=-1):
    """Return a graph of calls, each a function and its arguments, where ``V(n)`` is the n-th value so far."""
    graph = fx.Graph()
    given_tensors = [torch.randn(4, 6) for _ in range(inputs)]
    values = []
    for tensor in given_tensors:
        values.append(graph.placeholder(f"x{len(values)}"))
        values[-1].meta["val"] = tensor
    for function, *arguments in calls:
        placed = fx.node.map_aggregate(
            tuple(arguments),
            lambda argument: values[argument.number] if isinstance(argument, V) else argument,
        )
        keywords = placed[-1] if isinstance(placed[-1], dict) else {}
        values.append(graph.call_function(function, placed[: len(placed) - bool(keywords)], keywords))
    graph.output(values[returns])
    return fx.GraphModule({}, graph), given_tensors


class V:
    """A value of the graph, by its number."""

    def __init__(self, number):
        self.number = number


class SmallAttentionBlock(torch.nn.Module):
    """A residual block with attention, a norm that keeps statistics, and in-place operations."""

    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.qkv, self.head = torch.nn.Linear(8, 24), torch.nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.convolution(x)), inplace=True)
        x = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return self.head(F.dropout(x, 0.1, self.training)).mean(1)
