"""Call stacks as tables of frames, each stored once; frames of PyTorch and memfit are left out."""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from memfit.records import Frame
from memfit.user_lines import GENERATED

DEPTH = 40
"""Most frames kept of a stack, counted from the innermost."""

_INSTALLED_TORCH_OR_MEMFIT = re.compile(r"[/\\](?:site|dist)-packages[/\\](?:torch|memfit)[/\\]")
_NOT_PYTHON = re.compile(r"\?\?|<string>|.*\.(?:c|cc|cpp|cu|cuh|h|hpp|S)|<frozen .*|", re.DOTALL)
_MEMFIT = str(Path(__file__).parents[1]) + "/"


def is_omitted_from_stacks(file: str) -> bool:
    """Return whether a frame is left out of stacks: its file is memfit's own, or not Python."""
    return file.startswith(_MEMFIT) or _NOT_PYTHON.fullmatch(file) is not None


class StackTable:
    """Stacks and frames, each stored once.

    Args:
        is_user_file: whether a source file is the user's own; called once per file.

    >>> table = StackTable(lambda file: True)
    >>> table.intern([("train.py", 12, "main")]), table.intern([("train.py", 12, "main")])
    (0, 0)
    """

    def __init__(self, is_user_file: Callable[[str], bool]) -> None:
        self._is_user_file = is_user_file
        self._files: dict[str, bool | None] = {}  # file -> whether it is the user's; None: left out
        self._frames: dict[Frame, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._torch = torch_folder()

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Every frame, by index."""
        return tuple(self._frames)

    @property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """Every stack, by index: frames, innermost first."""
        return tuple(self._stacks)

    def intern(self, lines: Iterable[tuple[str, int, str]]) -> int:
        """Return the index of a stack, or -1 if all its frames are left out.

        Args:
            lines: ``(file, line, function)``, innermost first. PyTorch's own frames, memfit's, those
                that torch.compile generated and those that are not Python are left out.
        """
        return self.intern_frames([self.frame(*line) for line in lines])

    def intern_frames(self, frames: Iterable[int]) -> int:
        """Return the index of a stack, given the results of ``frame``; -1 among them is left out."""
        stack = tuple([frame for frame in frames if frame >= 0][:DEPTH])
        return self._stacks.setdefault(stack, len(self._stacks)) if stack else -1

    def frame(self, file: str, line: int, function: str) -> int:
        """Return the index of a frame, or -1 if it is PyTorch's, memfit's, generated or not Python."""
        if file not in self._files:
            self._files[file] = self._is_user_file(file) if self._kept(file) else None
        user = self._files[file]
        if user is None:
            return -1
        return self._frames.setdefault(Frame(file, line, function, user), len(self._frames))

    def _kept(self, file: str) -> bool:
        internal = file.startswith(self._torch) or _INSTALLED_TORCH_OR_MEMFIT.search(file)
        return not internal and not is_omitted_from_stacks(file) and not GENERATED.fullmatch(file)


def torch_folder() -> str:
    """Return the folder of the imported torch, which need not be an installed package."""
    torch = sys.modules.get("torch")
    # Without torch, a prefix that no path has.
    return str(Path(str(torch.__file__)).parent) + "/" if torch is not None else "\0"
