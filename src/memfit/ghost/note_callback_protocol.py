"""The signature of the callback that records a note for the user."""

from typing import Protocol

from memfit.records import Provenance


class NoteCallback(Protocol):
    """Records something that readers of the figures must know; see ``records.Note``."""

    def __call__(
        self,
        provenance: Provenance,
        text: str,
        where: str,
        *,
        sizes: bool = False,
        objects: bool = False,
        bound: str = "",
    ) -> None:
        """Record one note, and for a ``bound`` also the moment; ``where`` is ``file:line``, or empty."""
