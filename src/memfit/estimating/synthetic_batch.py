"""Make a batch that a model accepts, for use without data: valid names, shapes, dtypes and value ranges.

The batch follows from the model. A transformers model declares its inputs by its class, its configuration and
the signature of its ``forward``. Any other model counts as an image classifier if its ``forward`` takes one
argument and no target, it has a Conv2d, and its last layer is a Linear; its first and last layers give the
channels and classes. Every other model is refused: guessing its inputs would be guessing its memory.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memfit.errors import UsageError

_EACH_TOKEN = (
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForConditionalGeneration",
    "ForTokenClassification",
)
_EACH_SAMPLE = ("ForSequenceClassification", "ForImageClassification")
_SPAN = "ForQuestionAnswering"
_YOURSELF = "Make a batch yourself. Its values do not matter: memfit.estimate uses only shapes and dtypes."
_TARGETS = {"labels", "next_sentence_label", "start_positions", "end_positions"}
_CLASSES = (None, "single_label_classification")
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
_POSITIONS = re.compile(r"position_embeddings?|embed_positions|wpe")


def synthetic_batch(
    model: nn.Module,
    batch_size: int,
    *,
    length: int | None = None,
    image: tuple[int, int] | None = None,
    labels: bool = True,
) -> Any:
    """Make a batch of random tokens or images, on the CPU, that a model can be trained on.

    Memory depends on the sizes, which the caller chooses: a real batch is padded to its longest sample, so
    pass the longest length in the data. The batch has no padding (``attention_mask`` is all ones).

    Args:
        model: a transformers model for text or images, or an image classifier in plain PyTorch.
        batch_size: number of samples.
        length: tokens per sample, and per sequence of labels, for text models.
        image: height and width in pixels, for image models; by default the configuration's ``image_size``.
        labels: include the labels for the loss; a bare transformers model (``BertModel``) has none.

    Returns:
        For a transformers model, a dict of its keyword arguments; for others ``(images, labels)``, or the
        images alone. Equal at each call; PyTorch's random generator is not used.

    Raises:
        UsageError: a size is missing, is not a positive integer or exceeds the model's positions; or the
            model needs an input that memfit cannot make (boxes, masks, several labels per sample, regression
            targets), which the message names.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    >>> images, labels = synthetic_batch(net, 4, image=(32, 48))
    >>> images.shape, images.dtype, labels.shape, int(labels.max()) < 10
    (torch.Size([4, 3, 32, 48]), torch.float32, torch.Size([4]), True)
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"synthetic_batch takes a torch.nn.Module, not {type(model).__name__}.")
    for name, size in (("batch_size", batch_size), ("length", length)):
        if size is not None and (type(size) is not int or size < 1):
            raise UsageError(f"'{name}' must be an integer of at least 1, not {size!r}.")
    model = getattr(model, "_orig_mod", model)  # of torch.compile, whose forward takes any arguments
    make = _Maker(model, batch_size, length, image)
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        return make.keywords(labels=labels)
    channels, count = _classifier(model)
    images = make.images(channels)
    return (images, make.classes(count)) if labels else images


class _Maker:
    """Makes the tensors of one batch, with its own random generator."""

    def __init__(
        self, model: Any, batch_size: int, length: int | None, image: tuple[int, int] | None
    ) -> None:
        self._model = model
        self._name = type(model).__name__
        self._batch_size = batch_size
        self._length = length
        self._image = image
        self._generator = torch.Generator().manual_seed(0)

    def keywords(self, *, labels: bool) -> dict[str, torch.Tensor]:
        """Return the keyword arguments of a transformers model."""
        config, main = self._model.config, self._model.main_input_name
        takes = inspect.signature(self._model.forward).parameters
        vocabulary, channels = getattr(config, "vocab_size", None), getattr(config, "num_channels", None)
        if main == "input_ids" and main in takes and "pixel_values" not in takes and vocabulary:
            batch = {"input_ids": self._tokens(vocabulary)}
            if "attention_mask" in takes:
                batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        elif main == "pixel_values" and main in takes and channels:
            batch = {"pixel_values": self.images(channels)}
        else:
            raise UsageError(
                f"memfit cannot make inputs for {self._name}, whose forward takes ({', '.join(takes)}). "
                f"{_YOURSELF}"
            )
        return batch | (self._targets(takes.keys() & _TARGETS) if labels else {})

    def images(self, channels: int) -> torch.Tensor:
        """Return images in the dtype of the model."""
        size = self._image or getattr(getattr(self._model, "config", None), "image_size", None)
        if size is None:
            raise UsageError(f"{self._name} does not define an image size: pass image=(height, width).")
        height, width = (size, size) if isinstance(size, int) else size
        dtype = next((p.dtype for p in self._model.parameters() if p.is_floating_point()), torch.float32)
        shape = (self._batch_size, channels, height, width)
        return torch.rand(shape, generator=self._generator, device="cpu").to(dtype)

    def classes(self, count: int) -> torch.Tensor:
        """Return one class for each sample."""
        return torch.randint(count, (self._batch_size,), generator=self._generator, device="cpu")

    def _tokens(self, count: int) -> torch.Tensor:
        if self._length is None:
            raise UsageError(
                f"{self._name} is a text model: pass length=, the number of tokens in the longest sample."
            )
        for name, positions in _positions(self._model):
            if self._length > positions:
                raise UsageError(
                    f"length={self._length} is too long for {self._name}: its position embedding {name} "
                    f"supports at most {positions} tokens."
                )
        return torch.randint(count, (self._batch_size, self._length), generator=self._generator, device="cpu")

    def _targets(self, wanted: set[str]) -> dict[str, torch.Tensor]:
        config = self._model.config
        if not wanted and self._name.endswith("Model"):
            return {}
        if self._name.endswith(_EACH_TOKEN) and self._length is not None:
            tokens = self._name.endswith("ForTokenClassification")
            return {"labels": self._tokens(config.num_labels if tokens else config.vocab_size)}
        if self._name.endswith(_EACH_SAMPLE) and config.problem_type in _CLASSES and config.num_labels > 1:
            return {"labels": self.classes(config.num_labels)}
        if self._name.endswith(_SPAN) and self._length is not None:
            return {name: self.classes(self._length) for name in ("start_positions", "end_positions")}
        if not wanted:
            raise UsageError(
                f"memfit cannot make labels for {self._name}: its forward takes none of the labels that "
                f"memfit knows ({', '.join(sorted(_TARGETS))}). Pass labels=False."
            )
        raise UsageError(
            f"memfit cannot make the labels that {self._name} takes: {', '.join(sorted(wanted))}. Pass "
            "labels=False, and make these labels yourself."
        )


def _classifier(model: nn.Module) -> tuple[int, int]:
    """Return the channels of an image classifier's images, and its number of classes.

    Raises:
        UsageError: the model is not an image classifier.
    """
    takes = inspect.signature(model.forward).parameters
    needed = [name for name, each in takes.items() if each.default is each.empty]
    layers = [module for module in model.modules() if isinstance(module, _LAYERS)]
    first = next((layer for layer in layers if isinstance(layer, nn.Conv2d)), None)
    if len(needed) != 1 or any(name.startswith(("target", "label")) for name in takes):
        why = f"its forward takes {', '.join(takes)}, not only images"
    elif first is None:
        why = "it has no Conv2d"
    elif not isinstance(layers[-1], nn.Linear):
        why = "its last layer is not a Linear"
    else:
        return first.in_channels, layers[-1].out_features
    raise UsageError(
        f"memfit cannot make inputs for {type(model).__name__}: it is not an image classifier ({why}). "
        f"{_YOURSELF}"
    )


def _positions(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the embeddings of learned positions in a model, and the number of tokens each supports.

    Some start above zero: after the padding index, or at an ``offset``.

    Source: ``create_position_ids_from_input_ids`` in ``models/roberta/modeling_roberta.py`` and
    ``BartLearnedPositionalEmbedding`` in ``models/bart/modeling_bart.py``, transformers 5.23.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _POSITIONS.fullmatch(name.rpartition(".")[2]):
            skipped = 0 if module.padding_idx is None else module.padding_idx + 1
            yield name, module.num_embeddings - getattr(module, "offset", skipped)
