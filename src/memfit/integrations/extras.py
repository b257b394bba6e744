"""Import an optional package, or say which extra installs it."""

from collections.abc import Iterator
from contextlib import contextmanager

from memfit.errors import UsageError


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Report a missing package of the block's imports as one of an extra.

    Args:
        name: of the extra, and of the package.

    Raises:
        UsageError: the package is not installed.

    >>> with needs_extra("lightning"):
    ...     import tomllib
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"memfit.{name} needs a package that is not installed ({error.name}). Install it with pip "
            f"install 'memfit[{name}]'."
        ) from error
