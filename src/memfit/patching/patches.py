"""What memfit replaces in PyTorch and in other libraries: one declaration for each owner and purpose.

A module that replaces names declares them once, and installs the replacements when it needs them:

    _TENSOR = Patch("torch._tensor:Tensor", "to", "cpu", why="answer copies")
    remove = _TENSOR.install("to", lambda original: before(print, original))

Nothing else in memfit assigns to attributes of PyTorch. ``memfit doctor --patches`` lists all declarations:
these names must be in the next version of PyTorch, too.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal

from memfit.errors import UnsuitableEnvironmentError
from memfit.patching.after_import import call_after_import

_ABSENT = object()


class Patch:
    """Attributes of a class or a module that memfit replaces for one purpose.

    Args:
        owner: a module, or a class in it after a colon: ``torch.optim.optimizer:Optimizer``.
        names: of the attributes; with an asterisk, of all that match.
        why: completes "memfit replaces it to …".
        source: PyTorch's file and symbol on whose behaviour the replacement depends, where it is not the
            owner's own.
        also: modules that have imported the names from their owner, separated by blanks: they get the same.
        optional: which versions lack the names; empty if all must have them.
        adds: whether memfit adds the names: their owner has none.
    """

    declared: ClassVar[list["Patch"]] = []
    """Every one in the modules that have been imported."""

    def __init__(
        self,
        owner: str,
        *names: str,
        why: str,
        source: str = "",
        also: str = "",
        optional: str = "",
        adds: bool = False,
    ) -> None:
        self.owner, self.names, self.why, self.source = owner, names, why, source
        self.also, self.optional, self.adds = also, optional, adds
        self.declared.append(self)

    def install(self, name: str, replacement: Callable[[Any], Any], *, on: Any = None) -> Callable[[], None]:
        """Replace an attribute.

        Args:
            name: one of the declared.
            replacement: returns what replaces the original, which it is passed; it ignores the object that it
                is passed for a name that memfit adds.
            on: an instance of the owner, or a class derived from it, to be changed in its place.

        Returns:
            A function that restores the original, unless other code has replaced it since.
        """
        if not self.declares(name):
            raise LookupError(f"{self.owner} {name} is not declared")
        owners = [on if on is not None else self._owner()]
        original = _ABSENT if owners[0] is None else getattr(owners[0], name, _ABSENT)
        if original is _ABSENT and not self.adds:
            if self.optional:
                return lambda: None
            raise UnsuitableEnvironmentError(self._missing(name))
        value = replacement(original)
        owners += [sys.modules[each] for each in self.also.split()]
        restore = [_set(owner, name, value) for owner in owners]

        def remove() -> None:
            for each in restore:
                each()

        return remove

    def wrap(self, name: str, around: Callable[..., Any], *, on: Any = None) -> Callable[[], None]:
        """Replace a function by ``around(original, ...)``, as ``install`` does; methods pass their object."""
        return self.install(name, functools.partial(wrapped, around=around), on=on)

    def wrap_when_imported(self, **arounds: Callable[..., Any]) -> None:
        """Replace names as ``wrap`` does, as soon as the module of their owner has been imported."""

        def wrap() -> None:
            for name, around in arounds.items():
                self.wrap(name, around)

        call_after_import(self.module, wrap)

    @property
    def module(self) -> str:
        """The module of the owner."""
        return self.owner.partition(":")[0]

    def declares(self, name: str) -> bool:
        """Return whether a name is among those that are declared."""
        return name in self.names or any(fnmatchcase(name, each) for each in self.names if "*" in each)

    def present(self) -> tuple[str, ...]:
        """Return the declared names that the owner has, each of them where one has an asterisk.

        Raises:
            ImportError: the library is not installed, or has no such module.
        """
        return tuple(each for name in self.names for each in self.matching(name))

    def matching(self, name: str) -> list[str]:
        """Return what the owner has of a declared name: several names if it has an asterisk."""
        owner = self._owner()
        if "*" in name:
            return [each for each in dir(owner) if fnmatchcase(each, name)]
        return [name] if owner is not None and (self.adds or hasattr(owner, name)) else []

    def _owner(self) -> Any:
        """Return the owner; None if its module has no such class."""
        module, _, path = self.owner.partition(":")
        owner: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in path.split(".") if path else ():
            owner = getattr(owner, part, None)
        return owner

    def _missing(self, name: str) -> str:
        from importlib.metadata import version  # imports much, for an error

        library = self.owner.replace(":", ".").partition(".")[0]
        product = "PyTorch" if library == "torch" else library
        return (
            f"{product} {version(library)} has no {self.owner.replace(':', '.')}.{name}, which memfit "
            f"replaces to {self.why}. Install a version of {product} that memfit supports; 'memfit doctor "
            "--patches' lists every such name."
        )


def _set(owner: Any, name: str, value: object) -> Callable[[], None]:
    """Set an attribute; return a function that restores it if it has not been set again."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)

    def restore() -> None:
        if vars(owner).get(name) is not value:
            return
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return restore


def wrapped(function: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like ``function`` that calls ``around(function, ...)``.

    >>> wrapped(max, around=lambda original, *args: -original(*args))(1, 2)
    -2
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return around(function, *args, **options)

    return call


def call_before(action: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` to call ``action`` with the same arguments first.

    >>> call_before(print, max)(1, 2)
    1 2
    2
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        action(*args, **options)
        return function(*args, **options)

    return call


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
