"""Groups of options in ``--help``, and option values that several commands read the same way."""

from cyclopts import Group

TARGET = Group("The GPU", sort_key=1)
OUTPUT = Group("Output", sort_key=2)
GHOST = Group("What the ghost cannot know", sort_key=3)


def bytes_or_none(text: str | None) -> int | None:
    """Return the bytes that an option gives, such as ``12GiB``, or None if the option was not given.

    Raises:
        UsageError: the text is not an amount of memory.

    >>> bytes_or_none("1GiB")
    1073741824
    """
    from memfit.units import parse_bytes

    return None if text is None else parse_bytes(text)
