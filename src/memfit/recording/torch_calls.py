"""What of PyTorch's own Python allocated: the functions between the script's line and the allocator.

    frames, innermost first                                call
    _multi_tensor_adam < adam < step < [train.py:9]        adam/_multi_tensor_adam
    allocate < foreach_all_gather < ... < [train.py:8]     foreach_all_gather/allocate, and it communicates
    relu < forward < __call__ < [model.py:40]              relu
    forward < __call__ < [model.py:41]                     nothing: modules are labelled
    [train.py:7]                                           nothing: the line says it

PyTorch spells how an optimizer steps in its functions' names alike, whichever optimizer it is.

Source: torch/optim/*.py (``_multi_tensor_*``, ``_single_tensor_*``, ``_fused_*``), PyTorch 2.14.1.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.trace.stack_table import is_omitted_file, torch_folder

_PASSES_ON = re.compile(
    r"utils/_contextlib\.py|_compile\.py|_ops\.py|_tensor\.py|storage\.py|_dynamo/.*|optim/optimizer\.py|distributed/tensor/.*"
)
"""Files of decorators, dispatch and tensors themselves: what called them is meant."""
_WRAPPER = re.compile(r"<.*|\w*wrap\w*|__\w+__")
_MODULES = "nn/modules/"
_COMMUNICATES = "distributed/", "nn/parallel/"
_HOW = {"_multi_tensor_": "foreach", "_single_tensor_": "for-loop", "_fused_": "fused"}


class Call(NamedTuple):
    """What of PyTorch's Python an event happened in."""

    name: str = ""
    """The innermost function, after the one that called it; empty if a module or the script called C++."""
    communicates: bool = False
    """Whether it is of ``torch.distributed``, or of what copies a model to several GPUs."""

    @property
    def how(self) -> str:
        """How an optimizer steps: ``foreach``, ``for-loop``, ``fused``; empty in what is no such step."""
        functions = self.name.split("/")
        return next((how for prefix, how in _HOW.items() for one in functions if one.startswith(prefix)), "")


def calls(history: Sequence[Mapping[str, Any]]) -> tuple[npt.NDArray[np.int32], tuple[Call, ...]]:
    """Say what of PyTorch each event of a history happened in.

    Args:
        history: ``n`` events, as PyTorch gives them; stacks are shared, and each is looked at once.

    Returns:
        ``n`` indices, and what they count; the first is that of none.
    """
    root = torch_folder()
    table = {Call(): 0}
    by_list: dict[int, int] = {}
    column = np.zeros(len(history), np.int32)
    for position, event in enumerate(history):
        frames = event.get("frames", ())
        index = by_list.get(id(frames))
        if index is None:
            found = call_of(((frame["filename"], frame["name"]) for frame in frames), root)
            index = by_list[id(frames)] = table.setdefault(found, len(table))
        column[position] = index
    return column, tuple(table)


def call_of(frames: Iterable[tuple[str, str]], root: str) -> Call:
    """Say what of PyTorch was called.

    Args:
        frames: file and function, innermost first.
        root: PyTorch's folder, with a slash.

    >>> frames = [("/t/optim/sgd.py", "_fused_sgd"), ("/t/optim/sgd.py", "sgd"), ("train.py", "main")]
    >>> call_of(frames, "/t/")
    Call(name='sgd/_fused_sgd', communicates=False)
    """
    names: list[str] = []
    communicates = False
    for file, function in frames:
        if is_omitted_file(file):
            continue
        path = file.removeprefix(root)
        if path == file or path.startswith(_MODULES):
            break
        if _PASSES_ON.fullmatch(path) or _WRAPPER.fullmatch(function):
            continue
        communicates = communicates or (not names and path.startswith(_COMMUNICATES))
        names.insert(0, function)
        if len(names) == 2:  # noqa: PLR2004 - with its caller it can be understood
            break
    return Call("/".join(names), communicates)
