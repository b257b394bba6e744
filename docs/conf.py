"""Sphinx's settings: `make guide` builds the pages of this repository and the API reference as one site.

The root of the repository is the source folder, so that the links of pages are those that work in the
repository. Links to other files (schemas, scripts) become downloads.
"""

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config as GoogleConfig
from sphinx.ext.napoleon import GoogleDocstring

import memfit
import memfit.errors

ROOT = Path(__file__).parents[1]
TRAINERS = ("accelerate", "lightning", "mmengine", "transformers")
INDEXES = (
    "docs/guide/index",
    "docs/README",
    "docs/decisions/README",
    "README",
    "docs/benchmarks",
    "docs/accuracy",
)
"""Pages whose links to other pages make the tree of contents; a page is below the first that links to it."""
API = "docs/guide/api"
HOMES = {"Arena": "memfit.arenas.arena", "Watch": "memfit.watching.watch"}
"""Modules of the results that functions import late: their annotations are strings."""

project = "memfit"
version = release = memfit.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
include_patterns = [
    "*.md",
    "docs/**.md",
    "examples/README.md",
    "benchmarks/results/*.md",
    "benchmarks/gpu/results/*.md",
]
exclude_patterns = [".*", "src", "tests"]
root_doc = INDEXES[0]
myst_heading_anchors = 6  # as in the repository, a link may lead to any heading
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
html_theme = "furo"
nitpicky = True
# Names of other projects, and classes behind the public ones, which have no page.
nitpick_ignore_regex = [
    ("py:.*", r"(?!memfit\.)\w+\..*"),
    ("py:.*", r"memfit\.\w+\..*"),
    ("py:class", "ArenaReport|Optimizer"),  # imported for type checkers only
]


def pages_below() -> dict[str, list[str]]:
    """Return, for each page of INDEXES, the pages that it is the first to link to, in order."""
    found: dict[str, list[str]] = {}
    placed = set(INDEXES[:1])
    for index in INDEXES:
        path = ROOT / f"{index}.md"
        targets = re.findall(r"\]\(([^)\s:#]+)\.md\)", path.read_text())
        names = [str((path.parent / each).resolve().relative_to(ROOT)) for each in targets]
        found[index] = [name for name in dict.fromkeys(names) if name not in placed]
        placed.update(found[index])
    return found


def api_directives() -> str:
    """Return the directives that document memfit's public names, their results, and its errors."""
    public = [getattr(memfit, name) for name in memfit.__all__]
    functions = [value for value in public if inspect.isfunction(value)]
    classes = [value for value in public if inspect.isclass(value) and not issubclass(value, Exception)]
    results = [each for value in functions for each in returned_classes(value) if each not in classes]
    errors = [value for value in vars(memfit.errors).values() if inspect.isclass(value)]
    sections = {
        "Functions": [("function", f"memfit.{value.__name__}") for value in functions],
        "Classes": [("class", f"memfit.{value.__name__}") for value in classes],
        "Results": [("class", f"{value.__module__}.{value.__name__}") for value in dict.fromkeys(results)],
        "Trainers": [("module", f"memfit.integrations.{name}") for name in TRAINERS],
        "Errors": [("exception", f"{value.__module__}.{value.__name__}") for value in errors],
    }
    return "\n".join(
        f"## {title}\n\n" + "\n".join(_directive(*each) for each in entries)
        for title, entries in sections.items()
    )


def returned_classes(function: Callable[..., object]) -> list[type]:
    """Return the classes of memfit that a function returns, alone or in a union or a tuple."""
    hint = inspect.get_annotations(function).get("return")
    if isinstance(hint, str):  # a name that is imported for type checkers only
        hint = getattr(importlib.import_module(HOMES[hint]), hint)
    found = [each for each in (hint, *get_args(hint)) if inspect.isclass(each)]
    return [each for each in found if each.__module__.startswith("memfit.")]


def _directive(kind: str, name: str) -> str:
    members = "   :members:\n" if kind in {"class", "module"} else ""
    return f"```{{eval-rst}}\n.. auto{kind}:: {name}\n{members}```\n"


def read_docstring(
    _app: Sphinx, what: str, name: str, value: object, _options: object, lines: list[str]
) -> None:
    """Turn a docstring in Google's style into reStructuredText.

    Sphinx's extension for this takes the words before a colon in a field's docstring for its type.
    """
    if what not in ("attribute", "property"):
        lines[:] = GoogleDocstring(lines, GoogleConfig(), what=what, name=name, obj=value).lines()


def extend_page(_app: Sphinx, page: str, source: list[str]) -> None:
    """Append the tree of contents to an index, the directives to the API page; add a missing title."""
    if not source[0].lstrip().startswith(("# ", "<!--")):
        source[0] = f"# {page.rpartition('/')[2]}\n\n{source[0]}"
    below = pages_below().get(page)
    if below:
        entries = "\n".join(f"/{each}" for each in below)
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"
    if page == API:
        source[0] += "\n" + api_directives()


def setup(app: Sphinx) -> None:
    """Have Sphinx call this file's functions."""
    app.connect("source-read", extend_page)
    app.connect("autodoc-process-docstring", read_docstring)
