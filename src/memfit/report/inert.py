"""Text from elsewhere, made harmless for a terminal."""


def inert(text: str) -> str:
    r"""Return text with every control and bidirectional character shown as an escape.

    >>> inert("layer\x1b[31m")
    'layer\\x1b[31m'
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
