"""Compute the constants that Inductor folds on the CPU, because the ghost computes nothing.

Inductor replaces a tensor of one repeated value by that value: it runs the operators that create the tensor
on tensors of one element and reads the result. A wrong value would change the program (a multiplication by
1 is removed), so the same operators also run on the CPU.

Source: ``UniformValueConstantFolder`` in torch/_inductor/fx_passes/joint_graph.py, PyTorch 2.14.1.
"""

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.ghost.values.known_values import KnownValues
from memfit.ghost.values.tensor_facts import KnownValue, is_plain_tensor
from memfit.patching.patches import Patch

_FOLDER = Patch(
    "torch._inductor.fx_passes.joint_graph:UniformValueConstantFolder", "run", why="compute folded constants"
)


def track_folded_constants(known: KnownValues) -> None:
    """Record the values of the constants that Inductor folds, from now on. Inductor must be imported.

    Args:
        known: the known values of tensors, from which reads are answered.
    """

    def run_on_cpu_too(run: Any, folder: Any) -> Any:
        with _OnCpuToo(known):
            return run(folder)

    _FOLDER.wrap("run", run_on_cpu_too)


class _OnCpuToo(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Also runs every operator whose CUDA arguments are known on the CPU, and records its result.

    The folder accesses the storage of each of its tensors to identify them, after which ``KnownValues``
    treats them as unknown. The folder writes to none of them, so this class remembers their values.
    """

    def __init__(self, known: KnownValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known
        self._made = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor)
            and is_plain_tensor(result)
            and result.is_cuda
            and result.numel() == 1
        ):
            value = self._computed(func, args, kwargs or {})
            if value is not None:
                self._known.put(result, value, fresh=not func._schema.is_mutable)
                self._made[result] = value
        return result

    def _computed(self, func: Any, args: Any, kwargs: Any) -> KnownValue | None:
        """Return an operator's result on the CPU; None if an argument is unknown or the CPU has no kernel."""
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
        return None if computed.is_complex() else KnownValue(computed.item())

    def _twin(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if not isinstance(leaf, torch.Tensor) or not leaf.is_cuda:
            return leaf
        known = self._made[leaf] if leaf in self._made else self._known.get(leaf)
        return None if known is None else torch.full(leaf.shape, known.value, dtype=leaf.dtype, device="cpu")
