"""What modules keep for the whole process, and what they write to its environment, is listed in the guide."""

import ast
from pathlib import Path

import memfit

PACKAGE = Path(memfit.__file__).parent
GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"
KEEPS = ("ContextVar", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary")
WRITES = {f"os.environ.{name}" for name in ("update", "setdefault", "pop")}


def kept_by(tree):
    """Yield the module's names that start empty, to be filled later, or that a function assigns."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            written = ast.unparse(node.value)
            if written in {"[]", "{}"} or written.partition("(")[0].rpartition(".")[2] in KEEPS:
                yield ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names


def writes_environment(tree):
    """Return whether a module writes to the environment of its process."""
    stored = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    )
    calls = (ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(ast.unparse(each) == "os.environ" for each in stored) or not WRITES.isdisjoint(calls)


def test_the_guide_lists_all_state_of_the_process():
    found = set()
    for file in PACKAGE.rglob("*.py"):
        name, tree = file.relative_to(PACKAGE).as_posix(), ast.parse(file.read_text())
        found |= {(name, each) for each in kept_by(tree)}
        if writes_environment(tree):
            found.add((name, "os.environ"))
    section = GUIDE.read_text().partition("### State of the process")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:3] for row in section.splitlines() if row.startswith("| `")]
    assert sorted((file.strip(" `"), name.strip(" `")) for file, name in rows) == sorted(found)
