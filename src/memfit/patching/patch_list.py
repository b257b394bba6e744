"""List every name that memfit replaces in PyTorch and in other libraries: what the modules declare."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memfit.patching.patches import Patch

_PACKAGE = Path(__file__).parents[1]
_DECLARES = "from memfit.patching.patches import"

State = Literal["present", "absent", "not installed"]


@dataclass(frozen=True, slots=True)
class ReplacedName:
    """A name that memfit replaces for one purpose."""

    name: str
    why: str
    """Completes "memfit replaces it to …"."""
    source: str
    """The file on whose behaviour the replacement depends; empty if it is that of the name."""
    state: State
    """Whether the library that is installed here has it."""
    optional: str
    """Which versions lack it; empty if all must have it."""


def replaced_names() -> tuple[ReplacedName, ...]:
    """Import every module of memfit that declares patches, and PyTorch; return what they declare, by name."""
    for file in sorted(_PACKAGE.rglob("*.py")):
        if _DECLARES in file.read_text(encoding="utf-8"):
            importlib.import_module(".".join(file.relative_to(_PACKAGE.parent).with_suffix("").parts))
    found = [
        each for patch in Patch.declared if not patch.owner.startswith("memfit.") for each in _names(patch)
    ]
    return tuple(sorted(set(found), key=lambda each: (each.name, each.why)))


def _names(patch: Patch) -> Iterator[ReplacedName]:
    owner = patch.owner.replace(":", ".")
    for name in patch.names:
        try:
            state: State = "present" if patch.matching(name) else "absent"
        except ImportError:
            state = "not installed"
        yield ReplacedName(f"{owner}.{name}", patch.why, patch.source, state, patch.optional)
