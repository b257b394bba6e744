"""A batch that a model accepts, where there is no data: right in names, shapes, types and ranges, no more.

What a model wants is read off the model: transformers models say it in their class, their configuration and
the signature of their ``forward``; of an image classifier the first convolution and the last linear layer
tell. Everything else is refused by name: a guess at what a model is fed would be a guess at its memory.
"""

import inspect
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
        labels: what the loss is computed from, too.

    Returns:
        For a transformers model, a dict of its keyword arguments; for others ``(images, labels)``, or the
        images alone. The same each time; PyTorch's random generator is left as it is.

    Raises:
        UsageError: a size is missing, or the model wants what is not known here; it is named.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    >>> images, labels = synthetic_batch(net, 4, image=(32, 48))
    >>> images.shape, images.dtype, labels.shape, int(labels.max()) < 10
    (torch.Size([4, 3, 32, 48]), torch.float32, torch.Size([4]), True)
    """
    if batch_size < 1:
        raise UsageError(f"A batch has at least one sample, not {batch_size}.")
    make = _Maker(model, batch_size, length, image)
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        return make.keywords(labels=labels)
    images = make.images(_first(model, nn.Conv2d).in_channels)
    return (images, make.classes(_first(model, nn.Linear, last=True).out_features)) if labels else images


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
        if main == "input_ids" and "pixel_values" not in takes:
            batch = {"input_ids": self._tokens(config.vocab_size)}
            if "attention_mask" in takes:
                batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        elif main == "pixel_values":
            batch = {"pixel_values": self.images(config.num_channels)}
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
        return torch.randint(count, (self._batch_size, self._length), generator=self._generator)

    def _targets(self, wanted: set[str]) -> dict[str, torch.Tensor]:
        config = self._model.config
        if not wanted:
            return {}
        if self._name.endswith(_EACH_TOKEN) and self._length is not None:
            tokens = self._name.endswith("ForTokenClassification")
            return {"labels": self._tokens(config.num_labels if tokens else config.vocab_size)}
        if self._name.endswith(_EACH_SAMPLE):
            return {"labels": self.classes(config.num_labels)}
        if self._name.endswith(_SPAN) and self._length is not None:
            return {name: self.classes(self._length) for name in ("start_positions", "end_positions")}
        raise UsageError(
            f"What {self._name} is to learn ({', '.join(sorted(wanted))}) is not known here. "
            "Make that yourself, and give labels=False here."
        )


def _first(model: nn.Module, kind: type[Any], *, last: bool = False) -> Any:
    """Return the first module of a kind, or the last.

    Raises:
        UsageError: there is none, so that the model is no image classifier.
    """
    found = [module for module in model.modules() if isinstance(module, kind)]
    if not found:
        raise UsageError(
            f"What {type(model).__name__} is fed is not known here: it has no {kind.__name__}, as an image "
            f"classifier would. {_YOURSELF}"
        )
    return found[-1 if last else 0]
