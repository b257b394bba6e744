"""Text from elsewhere, made harmless for a terminal."""

_MOST = 500


def inert(text: str, *, whole: bool = False) -> str:
    r"""Return text with every control and bidirectional character shown as an escape.

    Args:
        text: anything.
        whole: keep all of it, however long; otherwise the middle of what fills screens is left out.

    >>> inert("layer\x1b[31m")
    'layer\\x1b[31m'
    >>> inert("x" * 9_999)[245:265]
    'xxxxx[9,499 more]xxx'
    """
    if len(text) > _MOST and not whole:
        half = _MOST // 2
        text = f"{text[:half]}[{len(text) - 2 * half:,} more]{text[-half:]}"
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
