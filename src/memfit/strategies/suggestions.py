"""Refusing a name that is not known, with the nearest that are."""

import difflib
from collections.abc import Iterable

from memfit.errors import UsageError


def unknown(what: str, name: object, known: Iterable[str]) -> UsageError:
    """Return the error to raise.

    >>> print(unknown("a setting", "precison", ["precision", "loss_scale"]))
    'precison' is not a setting. Nearest: precision.
    """
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=3)
    told = f"Nearest: {', '.join(near)}." if near else f"Known: {', '.join(names)}."
    return UsageError(f"{name!r} is not {what}. {told}")
