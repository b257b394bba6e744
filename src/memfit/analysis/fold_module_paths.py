"""Repetition in module paths: layers with the same parts share one name.

blocks.0.fc  blocks.0.norm    blocks.1.fc  blocks.1.norm    head
blocks.0-1.fc                 blocks.0-1.norm               head
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

Tree = dict[str, "Tree"]


def fold_module_paths(paths: Sequence[str]) -> list[str]:
    """Replace numbered siblings with the same parts by a range of numbers.

    Args:
        paths: dotted module paths. Numbers without parts (``mlp.0``, ``mlp.2``) are kept.

    >>> fold_module_paths(["blocks.0.fc", "blocks.1.fc", "blocks.3.fc", "mlp.0", "mlp.2"])
    ['blocks.0-1,3.fc', 'blocks.0-1,3.fc', 'blocks.0-1,3.fc', 'mlp.0', 'mlp.2']
    """
    tree: Tree = {}
    ends = []
    for path in paths:
        node = tree
        for part in path.split("."):
            node = node.setdefault(part, {})
        ends.append(node)
    names = dict.fromkeys(map(id, ends), "")
    # Names are joined only where paths end, with an explicit stack: paths may be deeper than Python's
    # recursion limit, and all their prefixes larger than memory.
    parts: list[str] = []
    levels = [_named(tree)]
    while levels:
        name, below = next(levels[-1], (None, tree))
        if name is None:
            levels.pop()
            del parts[-1:]
            continue
        parts.append(name)
        if id(below) in names:
            names[id(below)] = ".".join(parts)
        levels.append(_named(below))
    return [names[id(end)] for end in ends]


def _named(node: Tree) -> Iterator[tuple[str | None, Tree]]:
    ranges = _ranges(node)
    return ((ranges.get(part, part), below) for part, below in node.items())


def _ranges(node: Tree) -> dict[str, str]:
    """Return the range that replaces each numbered part, where several have the same parts."""
    alike: dict[frozenset[str], list[int]] = {}
    for part, below in node.items():
        if part.isascii() and part.isdecimal() and below and str(int(part)) == part:
            alike.setdefault(frozenset(below), []).append(int(part))
    repeated = [sorted(numbers) for numbers in alike.values() if len(numbers) > 1]
    return {str(number): format_ranges(numbers) for numbers in repeated for number in numbers}


def format_ranges(numbers: Iterable[int], between: str = ",") -> str:
    """Format ascending numbers, runs of neighbours as first and last.

    >>> format_ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    found = [[number for _, number in run] for _, run in runs]
    return between.join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)
