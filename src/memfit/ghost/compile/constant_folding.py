"""Constants that a compiler folds by computing them on the GPU, where nothing is computed.

Inductor replaces tensors that hold one value everywhere by that value: it runs the operators that make them
on tensors of one element and reads what comes of it. A wrong answer would make another program (what is
multiplied by 1 disappears), so what those operators compute is computed a second time on the CPU.

Source: ``UniformValueConstantFolder`` in torch/_inductor/fx_passes/joint_graph.py, PyTorch 2.14.1.
"""

import functools
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.ghost.values.known_values import Known, KnownValues, is_plain


def follow_folding(known: KnownValues) -> None:
    """Know what Inductor folds, from now on. It has been imported.

    Args:
        known: where the values of tensors are kept; reads are answered from there.
    """
    from torch._inductor.fx_passes import joint_graph

    folder = joint_graph.UniformValueConstantFolder
    run = folder.run

    @functools.wraps(run)
    def run_followed(self: Any) -> Any:
        with _OnCpuToo(known):
            return run(self)

    folder.run = run_followed  # type: ignore[method-assign]


class _OnCpuToo(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator whose CUDA arguments are known on the CPU, too, and notes what it gives.

    The folder asks each of its tensors for its storage, to tell them apart, and ``KnownValues`` knows nothing
    of what was handed out that way. It writes to none of them, so what it made is remembered here.
    """

    def __init__(self, known: KnownValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self._made = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and is_plain(result) and result.is_cuda and result.numel() == 1:
            value = self._computed(func, args, kwargs or {})
            if value is not None:
                self._known.put(result, value, fresh=not func._schema.is_mutable)
                self._made[result] = value
        return result

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Known | None:
        """Return what an operator gives on the CPU; None if an argument is not known or the CPU lacks it."""
        twins: list[Any] = []
        leaves, structure = pytree.tree_flatten((args, kwargs))
        for leaf in leaves:
            twin = self._twin(leaf)
            if twin is None and leaf is not None:
                return None
            twins.append(twin)
        cpu_args, cpu_kwargs = pytree.tree_unflatten(twins, structure)
        try:
            computed = func(*cpu_args, **cpu_kwargs)
        except (RuntimeError, NotImplementedError):
            return None
        return None if computed.is_complex() else Known(computed.item())

    def _twin(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if not isinstance(leaf, torch.Tensor) or not leaf.is_cuda:
            return leaf
        known = self._made[leaf] if leaf in self._made else self._known.get(leaf)
        return None if known is None else torch.full(leaf.shape, known.value, dtype=leaf.dtype)
