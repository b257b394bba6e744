"""Let ``from_pretrained`` work without the weights: the model's configuration is enough.

transformers finds the checkpoint, reads it, then converts and moves the weights. Only the first two steps are
replaced, by zeros that take no memory (``skip_random_fills.py``), with the real checkpoint's names, shapes
and dtype. The rest is transformers' own code: dtypes, device maps, quantization, tied weights, the
allocator's warm-up.

Source: ``_get_resolved_checkpoint_files`` and ``PreTrainedModel._load_pretrained_model`` of
``transformers/modeling_utils.py``, 5.23.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from memfit.ghost.note_callback_protocol import NoteCallback
from memfit.patching.patches import Patch
from memfit.records import Provenance
from memfit.temporary_folders import TemporaryFolder
from memfit.user_lines import innermost_user_line

_FIND = Patch(
    "transformers.modeling_utils",
    "_get_resolved_checkpoint_files",
    why="build models without their weights",
    optional="some versions of transformers",
)
_LOAD = Patch(
    "transformers.modeling_utils:PreTrainedModel",
    "_load_pretrained_model",
    why="build models without their weights",
    optional="some versions of transformers",
)

_DTYPE_KNOWN = (
    "{name}: the weights were not loaded. The model was built from its configuration, with zero weights in "
    "{dtype}."
)
_DTYPE_ASSUMED = (
    "{name}: the weights were not loaded. The model was built from its configuration, which does not name "
    "the checkpoint's dtype: zero weights in {dtype} were assumed."
)
_ASSUMED = torch.float32
"""The dtype of a checkpoint that is not known."""


def substitute_missing_weights(modeling: Any, note: NoteCallback, *, no_weights: bool) -> None:
    """Substitute empty checkpoints for missing ones, from now on.

    Args:
        modeling: the module ``transformers.modeling_utils``. A version with another structure is left
            unpatched, and fails as it would without memfit.
        note: called when a checkpoint is substituted.
        no_weights: load no weights: also substitute checkpoints that are present or could be downloaded.
    """
    find = getattr(modeling, "_get_resolved_checkpoint_files", None)
    load = vars(modeling.PreTrainedModel).get("_load_pretrained_model")
    if find is not None and isinstance(load, staticmethod):
        empty = _EmptyCheckpoints(modeling, note, find, load.__func__, no_weights=no_weights)
        _FIND.install("_get_resolved_checkpoint_files", lambda _: empty.find, on=modeling)
        _LOAD.install(
            "_load_pretrained_model", lambda _: staticmethod(empty.load), on=modeling.PreTrainedModel
        )


class _EmptyCheckpoints:
    """Substitutes for missing checkpoints: a placeholder file for each, and the dtype of its weights."""

    def __init__(
        self,
        modeling: Any,
        note: NoteCallback,
        find: Callable[..., Any],
        load: Callable[..., Any],
        *,
        no_weights: bool,
    ) -> None:
        self._modeling = modeling
        self._note = note
        self._find = find
        self._load = load
        self._no_weights = no_weights
        self._folder: TemporaryFolder | None = None
        # By placeholder file: the name of the model, and the dtype of its checkpoint if that is known.
        self._placeholders: dict[str, tuple[Any, torch.dtype | None]] = {}

    def find(self, *args: Any, **options: Any) -> Any:
        """Find a checkpoint, or write a placeholder of one element, whose dtype transformers reads."""
        if not self._no_weights or options.get("gguf_file"):
            try:
                return self._find(*args, **options)
            except OSError:
                if options.get("gguf_file"):  # a GGUF file also holds the configuration
                    raise
        name = options.get("pretrained_model_name_or_path")
        stored = self._stored_dtype(name, options.get("download_kwargs") or {})
        if self._folder is None:
            self._folder = TemporaryFolder()
        file = str(Path(self._folder.name) / f"{len(self._placeholders)}.safetensors")
        self._modeling.safe_save_file({"placeholder": torch.zeros(1, dtype=stored or _ASSUMED)}, file)
        self._placeholders[file] = name, stored
        return [file], None

    def load(self, model: Any, state_dict: Any, files: list[str] | None, *args: Any, **options: Any) -> Any:
        """Load a checkpoint; for a placeholder, load zeros in the form in which the model would save them."""
        if not files or files[0] not in self._placeholders or state_dict is not None:
            return self._load(model, state_dict, files, *args, **options)
        name, stored = self._placeholders[files[0]]
        tied = getattr(model, "all_tied_weights_keys", {})
        saved = {name: tensor.to("meta") for name, tensor in model.state_dict().items() if name not in tied}
        original = self._modeling.revert_weight_conversion(model, saved)
        result = self._load(model, _zeros(original, stored or _ASSUMED), None, *args, **options)
        # What was made counts: the script may ask for another dtype than that of the checkpoint.
        made = " and ".join(dict.fromkeys(str(parameter.dtype) for parameter in model.parameters()))
        text = (_DTYPE_KNOWN if stored else _DTYPE_ASSUMED).format(name=name, dtype=made)
        self._note(
            Provenance.ASSUMED, text, innermost_user_line(), sizes=stored is None, objects=stored is None
        )
        return result

    def _stored_dtype(self, name: Any, download: Mapping[str, Any]) -> torch.dtype | None:
        """Return the checkpoint dtype that the configuration names, or None."""
        try:
            config, _ = self._modeling.PreTrainedConfig.get_config_dict(name, **download)
        except OSError:
            config = {}
        nested = [config, *(value for value in config.values() if isinstance(value, dict))]
        named = [part.get(key) for part in nested for key in ("dtype", "torch_dtype")]
        found = getattr(torch, next((text for text in named if isinstance(text, str)), ""), None)
        return found if isinstance(found, torch.dtype) else None


def _zeros(shapes: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return CPU zeros of these shapes, floating-point ones in ``dtype``; large ones take no memory."""
    return {
        name: torch.empty(
            like.shape, dtype=dtype if like.is_floating_point() else like.dtype, device="cpu"
        ).zero_()
        for name, like in shapes.items()
    }
