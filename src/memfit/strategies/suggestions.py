"""Errors for unknown names that suggest the nearest known ones."""

import difflib
from collections.abc import Iterable

from memfit.errors import UsageError


def unknown_name_error(what: str, name: object, known: Iterable[str]) -> UsageError:
    """Return the error to raise for an unknown name.

    >>> print(unknown_name_error("a setting", "precison", ["precision", "loss_scale"]))
    'precison' is not a setting. Nearest: precision.
    """
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=3)
    suggestion = f"Nearest: {', '.join(near)}." if near else f"Known: {', '.join(names)}."
    return UsageError(f"{name!r} is not {what}. {suggestion}")
