"""Run a function before each call of another."""

import functools
from collections.abc import Callable
from typing import Any


def before(action: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` to call ``action`` with the same arguments first.

    >>> before(print, max)(1, 2)
    1 2
    2
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        action(*args, **options)
        return function(*args, **options)

    return call
