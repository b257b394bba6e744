"""Escape text from traces and scripts, so that it cannot control the terminal."""

_MAX_LENGTH = 500


def escaped(text: str, *, whole: bool = False) -> str:
    r"""Return text with every control and bidirectional character shown as an escape.

    Args:
        text: any text.
        whole: keep all of it; otherwise the middle of a text over 500 characters is left out.

    >>> escaped("layer\x1b[31m")
    'layer\\x1b[31m'
    >>> escaped("x" * 9_999)[245:265]
    'xxxxx[9,499 more]xxx'
    """
    if len(text) > _MAX_LENGTH and not whole:
        half = _MAX_LENGTH // 2
        text = f"{text[:half]}[{len(text) - 2 * half:,} more]{text[-half:]}"
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
