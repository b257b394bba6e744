"""A batch that a model accepts, where there is no data: right in names, shapes, types and ranges, no more.

What a model wants is read off the model: transformers models say it in their class, their configuration and
the signature of their ``forward``. Any other is taken for an image classifier if its ``forward`` wants one
thing and no target, it convolves, and its last layer is linear; the first and the last layer tell the rest.
What is neither is refused by name: a guess at what a model is fed would be a guess at its memory.
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
_YOURSELF = "Make a batch yourself, of any values: memfit.estimate looks at shapes and types."
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
    """Make a batch of random tokens or images that a model can be trained on, on the CPU.

    Memory depends on its sizes, and those are yours to say: a real batch is padded to its longest sample, so
    give the longest there is. Nothing of it is padding (``attention_mask`` is all ones).

    Args:
        model: one of transformers that reads text or sees images, or an image classifier in plain PyTorch.
        batch_size: samples.
        length: tokens of a sample, for models that read text; of the labels, too.
        image: height and width in pixels, for models that see; by default what a configuration says.
        labels: what the loss is computed from, too; a bare transformers model (``BertModel``) has none.

    Returns:
        For a transformers model, a dict of its keyword arguments; for others ``(images, labels)``, or the
        images alone. The same each time; PyTorch's random generator is left as it is.

    Raises:
        UsageError: a size is missing, no size or more than the model has positions for, or the model wants
            what is not known here (boxes, masks, several labels a sample, numbers to predict); it is named.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    >>> images, labels = synthetic_batch(net, 4, image=(32, 48))
    >>> images.shape, images.dtype, labels.shape, int(labels.max()) < 10
    (torch.Size([4, 3, 32, 48]), torch.float32, torch.Size([4]), True)
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"A batch is made for a torch.nn.Module, not for a {type(model).__name__}.")
    for name, size in (("batch_size", batch_size), ("length", length)):
        if size is not None and (type(size) is not int or size < 1):
            raise UsageError(f"{name} is a whole number, at least one, not {size!r}.")
    model = getattr(model, "_orig_mod", model)  # of torch.compile, whose forward takes anything
    make = _Maker(model, batch_size, length, image)
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        return make.keywords(labels=labels)
    channels, count = _classifier(model)
    images = make.images(channels)
    return (images, make.classes(count)) if labels else images


class _Maker:
    """Makes the tensors of one batch, with a random generator of its own."""

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
            raise UsageError(f"What {self._name} is fed ({', '.join(takes)}) is not known here. {_YOURSELF}")
        return batch | (self._targets(takes.keys() & _TARGETS) if labels else {})

    def images(self, channels: int) -> torch.Tensor:
        """Return images in the dtype of the model."""
        size = self._image or getattr(getattr(self._model, "config", None), "image_size", None)
        if size is None:
            raise UsageError(
                f"{self._name} does not say how large its images are: give image=(height, width)."
            )
        height, width = (size, size) if isinstance(size, int) else size
        dtype = next((p.dtype for p in self._model.parameters() if p.is_floating_point()), torch.float32)
        shape = (self._batch_size, channels, height, width)
        return torch.rand(shape, generator=self._generator).to(dtype)

    def classes(self, count: int) -> torch.Tensor:
        """Return one class for each sample."""
        return torch.randint(count, (self._batch_size,), generator=self._generator)

    def _tokens(self, count: int) -> torch.Tensor:
        if self._length is None:
            raise UsageError(f"{self._name} reads text: give length=, the tokens of its longest sample.")
        for name, positions in _positions(self._model):
            if self._length > positions:
                raise UsageError(
                    f"{self._name} has no positions for length={self._length}: {name} has {positions}."
                )
        return torch.randint(count, (self._batch_size, self._length), generator=self._generator)

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
        targets = ", ".join(sorted(wanted)) or "it takes no labels"
        raise UsageError(
            f"What {self._name} is to learn ({targets}) is not known here. "
            "Make that yourself, and give labels=False here."
        )


def _classifier(model: nn.Module) -> tuple[int, int]:
    """Return the channels of an image classifier's images, and its number of classes.

    Raises:
        UsageError: the model is none.
    """
    takes = inspect.signature(model.forward).parameters
    needed = [name for name, each in takes.items() if each.default is each.empty]
    layers = [module for module in model.modules() if isinstance(module, _LAYERS)]
    first = next((layer for layer in layers if isinstance(layer, nn.Conv2d)), None)
    if len(needed) != 1 or any(name.startswith(("target", "label")) for name in takes):
        why = f"its forward takes {', '.join(takes)}, not images alone"
    elif first is None:
        why = "it has no Conv2d"
    elif not isinstance(layers[-1], nn.Linear):
        why = "its last layer is no Linear"
    else:
        return first.in_channels, layers[-1].out_features
    raise UsageError(
        f"What {type(model).__name__} is fed is not known here: it is no image classifier, as {why}. "
        f"{_YOURSELF}"
    )


def _positions(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the tables of learnt positions in a model, and how many tokens each serves.

    Some begin later than at zero: after the index of padding, or at an ``offset``.

    Source: ``create_position_ids_from_input_ids`` in ``models/roberta/modeling_roberta.py`` and
    ``BartLearnedPositionalEmbedding`` in ``models/bart/modeling_bart.py``, transformers 5.23.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _POSITIONS.fullmatch(name.rpartition(".")[2]):
            skipped = 0 if module.padding_idx is None else module.padding_idx + 1
            yield name, module.num_embeddings - getattr(module, "offset", skipped)
