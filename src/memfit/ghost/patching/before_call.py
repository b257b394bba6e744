"""Do something before each call of a function."""

import functools
from collections.abc import Callable
from typing import Any


def before(action: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` to do something with its arguments first.

    >>> before(print, max)(1, 2)
    1 2
    2
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        action(*args, **options)
        return function(*args, **options)

    return call
