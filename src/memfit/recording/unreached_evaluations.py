"""Find what may be an evaluation in the script's code and did not run: a call of ``eval()``.

Training steps alone do not show what an evaluation needs, so the answer names its line.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit.patching.patches import Patch
from memfit.user_lines import frame_locations, is_user_file

_MODULE = Patch("torch.nn.modules.module:Module", "train", why="learn which evaluations ran")

_LONGEST = 1 << 20
"""Bytes of a source file that is searched."""
_MOST_FILES = 1000
_EVAL = re.compile(rb"\.\s*eval\s*\(")


class UnreachedEvaluations:
    """The lines that led to ``train(False)`` of a module, as ``eval()`` does, from ``install`` on."""

    def __init__(self) -> None:
        self._called: set[tuple[str, int]] = set()
        self._script = ""

    def install(self) -> None:
        """Note each call; torch has been imported."""
        # Once a module has run, Python has removed it (runpy.run_module).
        self._script = getattr(sys.modules["__main__"], "__file__", None) or ""

        def noting(original: Any) -> Any:
            @functools.wraps(original)
            def noted(module: Any, mode: bool = True) -> Any:
                caller = sys._getframe(1)
                if not mode and caller.f_code is not original.__code__:  # which sets each submodule likewise
                    self._called.update(frame_locations(caller))
                return original(module, mode)

            return noted

        _MODULE.install("train", noting)

    def not_run(self) -> str:
        """Return a ``file:line`` in the script, or in modules beside it, that was not called.

        The script's own lines come first, then functions that also set a model to train, as what evaluates
        during training does: packages beside a script call ``eval()`` for other ends.
        """
        found = (
            (file != self._script, not trains, f"{file}:{lines[0]}")
            for file in _user_files(self._script)
            for lines, trains in _calls_of_eval(file)
            if not any((file, line) in self._called for line in lines)
        )
        return min(found, key=lambda each: each[:2], default=(True, True, ""))[2]


def _user_files(script: str) -> Iterator[str]:
    """Yield the source files of the script and of the user's modules that it has imported."""
    files = [script, *(getattr(module, "__file__", None) for module in list(sys.modules.values()))]
    found = dict.fromkeys(file for file in files if file and file.endswith(".py") and is_user_file(file))
    yield from list(found)[:_MOST_FILES]


def _calls_of_eval(file: str) -> list[tuple[range, bool]]:
    """Return the lines of each call of a method ``eval``, and whether ``train`` is called in that function.

    Calls of ``eval`` with arguments evaluate text.
    """
    try:
        if Path(file).stat().st_size > _LONGEST:
            return []
        source = Path(file).read_bytes()
        tree = ast.parse(source if _EVAL.search(source) else b"")
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    found: dict[int, tuple[range, bool]] = {}
    for scope in ast.walk(tree):  # outer functions first
        if isinstance(scope, ast.Module | ast.FunctionDef):
            trains = bool(_calls_without_arguments(scope, "train"))
            for call in _calls_without_arguments(scope, "eval"):
                found[call.lineno] = (range(call.lineno, (call.end_lineno or call.lineno) + 1), trains)
    return [found[line] for line in sorted(found)]


def _calls_without_arguments(scope: ast.AST, method: str) -> list[ast.Call]:
    calls = (node for node in ast.walk(scope) if isinstance(node, ast.Call))
    bare = (call for call in calls if not call.args and not call.keywords)
    return [call for call in bare if isinstance(call.func, ast.Attribute) and call.func.attr == method]
