"""Record what a script feeds its model: digests of what it copies to the GPU, and of parts that it passes on.

    loader ── indices drawn ──> batch on the CPU ── to("cuda") ──> model(batch)
    corpus ── to("cuda") ──> corpus[i:i + 35] ──> model(part)

The ghost computes nothing, but what a script copies to the GPU has contents, and views of a copy are parts of
these. A tensor that the GPU makes of them, or draws by itself, has none that memfit knows.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_leaves

from memfit.dispatch_modes import without_dispatch_modes
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.tensor_storage import storage_of
from memfit.records import InputTensor, StepInputs

_METHODS = Patch("torch._tensor:Tensor", "to", "cuda", "copy_", why="see what a script copies to the GPU")
_FUNCTIONS = Patch("torch", "tensor", "as_tensor", why="see what a script copies to the GPU")
_MODULE = Patch("torch.nn.modules.module:Module", "_apply", why="tell a model's copies from those of samples")
_LOADER_ITERATOR = Patch(
    "torch.utils.data.dataloader:_BaseDataLoaderIter", "_next_index", why="see which samples a loader draws"
)

_DIMENSIONS = 2
_MOST_ROWS = 4096
"""A dimension with more has one digest."""
_MOST_TENSORS = 64
_MOST_BYTES = 1 << 27
"""Of contents that are looked at."""
_MOST_BATCHES = 1 << 12


def digest_tensor_rows(tensor: torch.Tensor) -> InputTensor:
    """Return the digests of a tensor's rows.

    >>> whole, part = torch.arange(6).reshape(2, 3), torch.arange(3).reshape(1, 3)
    >>> digest_tensor_rows(whole).rows[0][:1] == digest_tensor_rows(part).rows[0]
    True
    """
    rows = []
    for dimension in range(min(tensor.ndim, _DIMENSIONS)):
        along = tensor.detach().cpu().resolve_conj().movedim(dimension, 0)
        # A copy: of a dimension with one element, a view may have any stride.
        content = along.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()
        size = len(along) if len(along) <= _MOST_ROWS else 1
        rows.append(tuple(map(_digest, content.reshape(size, -1) if size else content)))
    return InputTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(rows))


def _gpu_generator_offsets() -> tuple[int, ...]:
    return tuple(each.get_offset() for each in torch.cuda.default_generators)


def _digest(row: npt.NDArray[np.uint8]) -> str:
    return hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest()


class ModelInputRecorder:
    """Records from ``install`` on; calls of the model are for its user to pass on."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[Any, torch.Tensor, int]] = {}
        """By storage on the GPU: what ends with it; what was copied there, and its version then."""
        self._copied: list[InputTensor] = []
        self._passed: list[InputTensor] = []
        self._left = _MOST_BYTES
        self._drawn: list[list[tuple[str, ...]]] = []
        self._computed = False
        self._shapes: list[tuple[int, ...]] = []
        self._in_model = 0
        self._drawn_by_gpu: tuple[int, ...] | None = None
        """Where the GPUs' generators were when the step began, or the last call in it ended."""
        self._random = False

    def install(self, hooks: InstalledHooks) -> None:
        """Hook copies to the GPU, and loaders."""
        for patch in (_METHODS, _FUNCTIONS):
            for name in patch.names:
                hooks.wrap(patch, name, self._copy)
        hooks.wrap(_MODULE, "_apply", self._move_model)
        hooks.wrap_when_imported(_LOADER_ITERATOR, _next_index=self._draw)

    def found(self) -> StepInputs:
        """Return what has been recorded."""
        drawn = tuple(tuple(each) for each in self._drawn if each)
        return StepInputs(
            tuple(self._copied),
            tuple(self._passed),
            drawn,
            self._computed,
            tuple(self._shapes[:_MOST_TENSORS]),
            self._random,
        )

    def begin_outside(self) -> None:
        """Note where the GPUs' generators are: a step begins, or a call of the model has ended."""
        self._drawn_by_gpu = _gpu_generator_offsets()

    def end_outside(self) -> None:
        """Note whether the GPUs have drawn since: a call of the model begins, or the step ends."""
        self._random |= self._drawn_by_gpu not in {None, _gpu_generator_offsets()}

    def passes(self, passed: Any, *, is_model: bool = True) -> None:
        """Note what the model is passed, or another module such as the loss: it is about to be called."""
        with without_dispatch_modes():
            for leaf in tree_leaves(passed):
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda and leaf.layout is torch.strided:
                    self._shapes += [tuple(leaf.shape)] * is_model
                    self._pass(leaf)

    def _pass(self, tensor: torch.Tensor) -> None:
        source = self._sources.get(storage_of(tensor)._cdata)
        if source is None:
            # A loss may be a module, too, and is passed what the model has computed.
            self._computed |= tensor.ndim > 0 and not tensor.requires_grad
        if source is None or tensor.numel() == source[1].numel():
            return
        _, content, version = source
        if content._version == version and content.dtype == tensor.dtype:
            start = content.storage_offset() + tensor.storage_offset()
            self._passed += self._read(content.as_strided(tensor.shape, tensor.stride(), start))

    def _copy(self, original: Callable[..., Any], given: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(given, *args, **kwargs)
        source = args[0] if original.__name__ == "copy_" and args else given
        if not isinstance(result, torch.Tensor) or not result.is_cuda or result.layout is not torch.strided:
            return result
        if self._in_model or isinstance(source, torch.nn.Parameter) or not result.ndim:
            return result
        with without_dispatch_modes(), torch.no_grad():
            if not isinstance(source, torch.Tensor):
                source = torch.as_tensor(source, dtype=result.dtype, device="cpu")
            if source.device.type == "cpu" and source.shape == result.shape:
                self._copied += self._read(source)
                self._remember(result, source.detach().to(result.dtype).contiguous())
        return result

    def _remember(self, copy: torch.Tensor, source: torch.Tensor) -> None:
        storage = storage_of(copy)
        if copy.is_contiguous() and storage.nbytes() == copy.nbytes and not source.is_inference():
            address = storage._cdata
            end = weakref.ref(storage, lambda _: self._sources.pop(address, None))
            self._sources[address] = end, source, source._version

    def _read(self, tensor: torch.Tensor) -> Iterator[InputTensor]:
        """Yield the digests of a tensor, unless enough has been read."""
        if len(self._copied) + len(self._passed) < _MOST_TENSORS and tensor.nbytes <= self._left:
            self._left -= tensor.nbytes
            yield digest_tensor_rows(tensor)

    def _move_model(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        self._in_model += 1
        try:
            return original(model, *args, **kwargs)
        finally:
            self._in_model -= 1

    def _draw(self, original: Callable[..., Any], iterator: Any) -> Any:
        index = original(iterator)
        drawn = iterator.__dict__.setdefault("_memfit_drawn", [])
        if not drawn:
            self._drawn.append(drawn)
        # Without automatic batching, an index is not a sample's; None is that of an iterable data set.
        if iterator._auto_collation and len(drawn) < _MOST_BATCHES and None not in index:
            drawn.append(tuple(map(str, index)))
        return index
