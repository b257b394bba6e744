"""The calls that are being executed in the user's own code: where in the source, and with what variables."""

import linecache
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from memfit.scaffold.loss_statements import Span
from memfit.user_frame import is_user_file


@dataclass(frozen=True, slots=True)
class CallSite:
    """A call in a function of the user's."""

    frame: FrameType
    span: Span
    values: Mapping[str, Any]
    """The variables when the call was made: the function's own, and those of its module."""

    @property
    def source(self) -> str:
        """The text of the file."""
        return "".join(linecache.getlines(self.frame.f_code.co_filename))

    @property
    def line(self) -> str:
        """``file:line``."""
        return f"{self.frame.f_code.co_filename}:{self.span[0]}"


def call_sites() -> Iterator[CallSite]:
    """Yield the calls of the user's own code around the caller, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename) and (site := _site(frame)) is not None:
            yield site
        frame = frame.f_back


def creation_site() -> CallSite | None:
    """Return the user's call that creates the module whose ``__init__`` runs, or those around it."""
    for site in call_sites():
        code = site.frame.f_code
        first = site.frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if code.co_name != "__init__" or not isinstance(first, torch.nn.Module):
            return site
    return None


def _site(frame: FrameType) -> CallSite | None:
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    first, last, column, end = positions
    if first is None or last is None or column is None or end is None:
        return None
    return CallSite(frame, (first, last, column, end), {**frame.f_globals, **frame.f_locals})
