"""Let ``from_pretrained`` go on where the weights are not on this machine: the configuration is enough.

transformers looks for the checkpoint, reads it, and converts and moves what it read. Only the first two are
replaced, by hollow zeros (``hollow.py``) with the names, shapes and dtype that the real checkpoint has. What
follows is transformers' own: dtypes, device maps, quantization, tied weights, the allocator's warm-up.

Source: ``_get_resolved_checkpoint_files`` and ``PreTrainedModel._load_pretrained_model`` of
``transformers/modeling_utils.py``, 5.23.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from memfit.ghost.values.stand_ins import Note
from memfit.records import Provenance
from memfit.user_frame import user_line

_MADE_UP = (
    "{name}: the weights were not loaded. The model was made from its configuration, with empty weights in "
    "the dtype that it names for the checkpoint ({dtype})."
)
_GUESSED = (
    "{name}: the weights were not loaded. The model was made from its configuration, which does not say in "
    "which dtype the checkpoint is: empty weights in {dtype} stand for it."
)


def install(modeling: Any, note: Note, *, never: bool) -> None:
    """Answer for checkpoints that are not there, from now on.

    Args:
        modeling: the module ``transformers.modeling_utils``. One that is built otherwise is left alone, and
            fails as it would without memfit.
        note: called when a checkpoint is made up.
        never: make up those that are there, too, or could be downloaded.
    """
    find = getattr(modeling, "_get_resolved_checkpoint_files", None)
    load = vars(modeling.PreTrainedModel).get("_load_pretrained_model")
    if find is not None and isinstance(load, staticmethod):
        made_up = _MadeUp(modeling, note, find, load.__func__, never=never)
        modeling._get_resolved_checkpoint_files = made_up.find
        modeling.PreTrainedModel._load_pretrained_model = staticmethod(made_up.load)


class _MadeUp:
    """Checkpoints that are not there: a file that stands for each, and what it would hold."""

    def __init__(
        self, modeling: Any, note: Note, find: Callable[..., Any], load: Callable[..., Any], *, never: bool
    ) -> None:
        self._modeling = modeling
        self._note = note
        self._find = find
        self._load = load
        self._never = never
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._dtypes: dict[str, torch.dtype] = {}  # file -> of the checkpoint it stands for

    def find(self, *args: Any, **options: Any) -> Any:
        """Find a checkpoint, or make up a file for it with one element, of which the dtype is asked."""
        if not self._never or options.get("gguf_file"):
            try:
                return self._find(*args, **options)
            except OSError:
                if options.get("gguf_file"):  # it holds the configuration, too
                    raise
        name = options.get("pretrained_model_name_or_path")
        told = self._stored_dtype(name, options.get("download_kwargs") or {})
        dtype = told or torch.float32
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="memfit-")
        file = str(Path(self._folder.name) / f"{len(self._dtypes)}.safetensors")
        self._modeling.safe_save_file({"made up": torch.zeros(1, dtype=dtype)}, file)
        self._dtypes[file] = dtype
        text = (_MADE_UP if told else _GUESSED).format(name=name, dtype=dtype)
        self._note(Provenance.ASSUMED, text, user_line(), sizes=told is None, objects=told is None)
        return [file], None

    def load(self, model: Any, state_dict: Any, files: list[str] | None, *args: Any, **options: Any) -> Any:
        """Load a checkpoint; for a file that was made up, hollow zeros as the model would have saved them."""
        dtype = self._dtypes.get(files[0]) if files else None
        if dtype is None or state_dict is not None:
            return self._load(model, state_dict, files, *args, **options)
        tied = getattr(model, "all_tied_weights_keys", {})
        saved = {name: tensor.to("meta") for name, tensor in model.state_dict().items() if name not in tied}
        original = self._modeling.revert_weight_conversion(model, saved)
        return self._load(model, _zeros(original, dtype), None, *args, **options)

    def _stored_dtype(self, name: Any, download: Mapping[str, Any]) -> torch.dtype | None:
        """Return the dtype that the configuration says the checkpoint has; None where it says nothing."""
        try:
            config, _ = self._modeling.PreTrainedConfig.get_config_dict(name, **download)
        except OSError:
            config = {}
        nested = [config, *(value for value in config.values() if isinstance(value, dict))]
        told = [part.get(key) for part in nested for key in ("dtype", "torch_dtype")]
        found = getattr(torch, next((text for text in told if isinstance(text, str)), ""), None)
        return found if isinstance(found, torch.dtype) else None


def _zeros(shapes: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return CPU zeros in those shapes, floating-point ones in that dtype; large ones cost no memory."""
    return {
        name: torch.empty(
            like.shape, dtype=dtype if like.is_floating_point() else like.dtype, device="cpu"
        ).zero_()
        for name, like in shapes.items()
    }
