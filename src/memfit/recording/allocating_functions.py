"""The PyTorch functions that allocated: the Python frames between the script's line and the allocator.

    frames, innermost first                                function
    _multi_tensor_adam < adam < step < [train.py:9]        adam/_multi_tensor_adam
    allocate < foreach_all_gather < ... < [train.py:8]     foreach_all_gather/allocate, which communicates
    relu < forward < __call__ < [model.py:40]              relu
    forward < __call__ < [model.py:41]                     none: modules have labels
    [train.py:7]                                           none: the script's line is enough

All optimizers name the functions of their foreach, for-loop and fused steps in the same way.

Source: torch/optim/*.py (``_multi_tensor_*``, ``_single_tensor_*``, ``_fused_*``), PyTorch 2.14.1;
``FlatParamHandle._alloc_padded_unsharded_flat_param``, torch/distributed/fsdp/_flat_param.py.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.trace.stack_table import is_omitted_from_stacks, torch_folder

_PASSES_ON = re.compile(
    r"utils/_contextlib\.py|_compile\.py|_ops\.py|_tensor\.py|storage\.py|_dynamo/.*|_library/.*|optim/optimizer\.py"
    r"|distributed/tensor/.*"
)
"""Files of decorators, dispatch and tensor methods: their callers are reported instead."""
_WRAPPER = re.compile(r"<.*|\w*wrap\w*|__\w+__")
_MODULES = "nn/modules/"
_COMMUNICATES = "distributed/", "nn/parallel/"
_HOW = {"_multi_tensor_": "foreach", "_single_tensor_": "for-loop", "_fused_": "fused"}


class TorchFunction(NamedTuple):
    """The function of PyTorch's Python code in which an event happened."""

    name: str = ""
    """``caller/function``, the innermost two; empty if a module or the script called C++ directly."""
    communicates: bool = False
    """Whether it belongs to ``torch.distributed`` or to a data-parallel wrapper."""

    @property
    def gathers(self) -> bool:
        """Whether it allocates what FSDP1 gathers: parameters of all ranks, which a graph may save."""
        return self.name.startswith("_alloc_padded_unsharded_flat_param/")

    @property
    def how(self) -> str:
        """The implementation of an optimizer step: ``foreach``, ``for-loop``, ``fused``; empty otherwise."""
        names = self.name.split("/")
        return next((how for prefix, how in _HOW.items() for name in names if name.startswith(prefix)), "")


def torch_functions_of_events(
    history: Sequence[Mapping[str, Any]],
) -> tuple[npt.NDArray[np.int32], tuple[TorchFunction, ...]]:
    """Return the PyTorch function of each event of a history.

    Args:
        history: ``n`` events, as PyTorch returns them; each of their shared stacks is examined once.

    Returns:
        ``n`` indices into the functions, and the functions; index 0 stands for no function.
    """
    root = torch_folder()
    table = {TorchFunction(): 0}
    by_stack: dict[int, int] = {}
    column = np.zeros(len(history), np.int32)
    for position, event in enumerate(history):
        frames = event.get("frames", ())
        index = by_stack.get(id(frames))
        if index is None:
            found = torch_function_of_stack(((frame["filename"], frame["name"]) for frame in frames), root)
            index = by_stack[id(frames)] = table.setdefault(found, len(table))
        column[position] = index
    return column, tuple(table)


def torch_function_of_stack(frames: Iterable[tuple[str, str]], root: str) -> TorchFunction:
    """Return the PyTorch function that a stack ends in.

    >>> frames = [("/t/optim/sgd.py", "_fused_sgd"), ("/t/optim/sgd.py", "sgd"), ("train.py", "main")]
    >>> torch_function_of_stack(frames, "/t/")
    TorchFunction(name='sgd/_fused_sgd', communicates=False)
    """
    names: list[str] = []
    communicates = False
    for file, function in frames:
        if is_omitted_from_stacks(file):
            continue
        path = file.removeprefix(root)
        if path == file or path.startswith(_MODULES):
            break
        if _PASSES_ON.fullmatch(path) or _WRAPPER.fullmatch(function):
            continue
        communicates = communicates or (not names and path.startswith(_COMMUNICATES))
        names.insert(0, function)
        if len(names) == 2:  # noqa: PLR2004 - the caller gives the function's name its context
            break
    return TorchFunction("/".join(names), communicates)
