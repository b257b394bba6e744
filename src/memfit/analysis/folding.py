"""Repetition in the paths of modules: layers with the same parts go by one name.

blocks.0.fc  blocks.0.norm    blocks.1.fc  blocks.1.norm    head
blocks.0-1.fc                 blocks.0-1.norm               head
"""

import itertools
from collections.abc import Iterable, Sequence

Tree = dict[str, "Tree"]


def folded(paths: Sequence[str]) -> list[str]:
    """Return paths in which neighbours that have the same parts below them are a range.

    Args:
        paths: dotted. Numbers without parts (``mlp.0``, ``mlp.2``) are kept.

    >>> folded(["blocks.0.fc", "blocks.1.fc", "blocks.3.fc", "mlp.0", "mlp.2"])
    ['blocks.0-1,3.fc', 'blocks.0-1,3.fc', 'blocks.0-1,3.fc', 'mlp.0', 'mlp.2']
    """
    tree: Tree = {}
    for path in paths:
        node = tree
        for part in path.split("."):
            node = node.setdefault(part, {})
    names: dict[str, str] = {}
    # By a list of its own, for paths may be deeper than Python's stack.
    waiting: list[tuple[Tree, str, str]] = [(tree, "", "")]
    while waiting:
        node, before, named = waiting.pop()
        ranges = _ranges(node)
        for part, below in node.items():
            path, name = f"{before}{part}", f"{named}{ranges.get(part, part)}"
            names[path] = name
            waiting.append((below, f"{path}.", f"{name}."))
    return [names[path] for path in paths]


def _ranges(node: Tree) -> dict[str, str]:
    """Return what the numbers among a module's parts are called, where several have the same parts."""
    alike: dict[frozenset[str], list[int]] = {}
    for part, below in node.items():
        if part.isascii() and part.isdecimal() and below and str(int(part)) == part:
            alike.setdefault(frozenset(below), []).append(int(part))
    repeated = [sorted(numbers) for numbers in alike.values() if len(numbers) > 1]
    return {str(number): _in_words(numbers) for numbers in repeated for number in numbers}


def _in_words(numbers: Iterable[int]) -> str:
    """Say which numbers these are, in order.

    >>> _in_words([0, 1, 2, 5])
    '0-2,5'
    """
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    found = [[number for _, number in run] for _, run in runs]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)
