"""A model of torchvision, timm or transformers in a plain training loop, with random weights and inputs.

    memfit plan torchvision:resnet50 --batch-size 64        a name of torchvision.models
    memfit plan timm:vit_base_patch16_224                   a name of timm
    memfit plan hf:gpt2 --length 1024                       a kind of model of transformers, with its defaults
    memfit plan hf:./llama                                  a folder with a config.json

Nothing is downloaded.
"""

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

KINDS = ("hf", "timm", "torchvision")
_SIZE = 224
"""Pixels of an image's side, for models that do not say theirs."""
_AUTO_CLASSES = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
)


class Trained(NamedTuple):
    """A model, and what trains it."""

    model: nn.Module
    batch: Callable[[], Any]
    """Makes a batch, on the CPU."""
    loss: Callable[[Any], torch.Tensor]
    """Returns the loss of a batch on the model's device."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the model that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="hf:NAME, hf:FOLDER, timm:NAME or torchvision:NAME")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--image-size", type=int, default=0, help="by default the model's own, or 224")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights")
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    kind, _, name = options.model.partition(":")
    builders = {"hf": _transformers, "timm": _timm, "torchvision": _torchvision}
    if kind not in builders or not name:
        raise SystemExit(f"{options.model} names no model: write hf:NAME, timm:NAME or torchvision:NAME.")
    trained = builders[kind](name, options)
    model = trained.model.to(options.device, getattr(torch, options.dtype)).train()
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[options.optimizer]
    optimizer = make(model.parameters(), lr=1e-4)
    for _ in range(options.steps):
        batch = _moved(trained.batch(), options.device, getattr(torch, options.dtype))
        with torch.autocast(options.device, torch.bfloat16, enabled=options.amp):
            loss = trained.loss(batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _torchvision(name: str, options: argparse.Namespace) -> Trained:
    models = _imported("torchvision.models")
    try:
        model = models.get_model(name, weights=None, **_no_backbone(models, name))
    except ValueError:
        raise SystemExit(_unknown("torchvision", name, models.list_models())) from None
    module = type(model).__module__
    if ".video." in module or ".optical_flow." in module:
        raise SystemExit(
            f"torchvision:{name} takes videos, for which memfit makes no batches: write a script."
        )
    return _of_images(model, options, options.image_size or _SIZE, detects=".detection." in module)


def _no_backbone(models: Any, name: str) -> dict[str, None]:
    """Return the arguments without which detection and segmentation would download their backbones."""
    parts = {*models.list_models(models.detection), *models.list_models(models.segmentation)}
    return {"weights_backbone": None} if name.lower() in parts else {}


def _timm(name: str, options: argparse.Namespace) -> Trained:
    timm = _imported("timm")
    if not timm.is_model(name):
        raise SystemExit(_unknown("timm", name, timm.list_models()))
    model = timm.create_model(name, pretrained=False)
    own = timm.data.resolve_model_data_config(model)["input_size"][-1]
    return _of_images(model, options, options.image_size or own, detects=False)


def _of_images(model: nn.Module, options: argparse.Namespace, size: int, *, detects: bool) -> Trained:
    count = options.batch_size

    def batch() -> Any:
        images = torch.randn(count, 3, size, size)
        if not detects:
            return images, torch.zeros(count, dtype=torch.long)
        box = {
            "boxes": torch.tensor([[0.0, 0.0, size / 2, size / 2]]),
            "labels": torch.ones(1, dtype=torch.long),
        }
        return list(images), [dict(box) for _ in range(count)]

    def loss(batch: Any) -> torch.Tensor:
        if detects:
            return sum(model(*batch).values(), torch.zeros((), device=batch[0][0].device))
        images, labels = batch
        found = model(images)
        heads = found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else [found]
        return sum((_classified(head, labels) for head in heads), torch.zeros((), device=images.device))

    return Trained(model, batch, loss)


def _classified(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of classes of images, or of their pixels."""
    return cross_entropy(scores, labels.view(-1, *[1] * (scores.ndim - 2)).expand(-1, *scores.shape[2:]))


def _transformers(name: str, options: argparse.Namespace) -> Trained:
    transformers = _imported("transformers")
    path = Path(name)
    if path.exists():
        folder = path if path.is_dir() else path.parent
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    else:
        try:
            config = transformers.AutoConfig.for_model(name)
        except ValueError:
            known = transformers.models.auto.configuration_auto.CONFIG_MAPPING.keys()
            raise SystemExit(_unknown("transformers", name, known)) from None
    config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    model = _with_loss(transformers, config, name)
    return Trained(model, lambda: _inputs(model, options), lambda batch: model(**batch).loss)


def _with_loss(transformers: Any, config: Any, name: str) -> nn.Module:
    """Return the model that a configuration names, or the first kind with a loss that suits it."""
    for architecture in config.architectures or ():
        if hasattr(transformers, architecture):
            made: nn.Module = getattr(transformers, architecture)(config)
            return made
    for auto in _AUTO_CLASSES:
        if type(config) in getattr(transformers, auto)._model_mapping:
            chosen: nn.Module = getattr(transformers, auto).from_config(config)
            return chosen
    raise SystemExit(f"hf:{name} has no language model and no classifier of images: write a script.")


def _inputs(model: Any, options: argparse.Namespace) -> dict[str, torch.Tensor]:
    config, count = model.config, options.batch_size
    if model.main_input_name == "pixel_values":
        size = options.image_size or getattr(config, "image_size", _SIZE)
        images = torch.randn(count, getattr(config, "num_channels", 3), size, size)
        return {"pixel_values": images, "labels": torch.zeros(count, dtype=torch.long)}
    tokens = torch.randint(config.vocab_size, (count, options.length))
    per_token = not type(model).__name__.endswith("ForSequenceClassification")
    return {"input_ids": tokens, "labels": tokens if per_token else torch.zeros(count, dtype=torch.long)}


def _moved(batch: Any, device: str, dtype: torch.dtype) -> Any:
    """Return a batch on a device; its numbers that are no integers have the weights' dtype."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else None)
    if isinstance(batch, dict):
        return {name: _moved(value, device, dtype) for name, value in batch.items()}
    return type(batch)(_moved(each, device, dtype) for each in batch)


def _imported(library: str) -> Any:
    import importlib

    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        package = library.partition(".")[0]
        if error.name != package:
            raise
        raise SystemExit(f"{package} is not installed: pip install {package}") from None


def _unknown(library: str, name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known))
    return f"{library} has no model {name!r}" + (f". Nearest: {', '.join(near)}." if near else ".")


if __name__ == "__main__":
    main()
