"""Settings under the names of today's trainers: MMEngine, Lightning, HuggingFace's two, MindSpore.

optim_wrapper = dict(type="AmpOptimWrapper", accumulative_counts=4, clip_grad=dict(max_norm=35))     MMEngine
precision = "bf16-mixed", gradient_clip_val = 1.0                                                    Lightning
optim = "adamw_torch_fused", gradient_checkpointing_kwargs = dict(use_reentrant=False)           HuggingFace
mixed_precision = "bf16"                                                                          Accelerate
gradients_mean = True                                                                              MindSpore
"""

from collections.abc import Iterator, Mapping
from typing import Any

from memfit.errors import UsageError
from memfit.strategies.setting_checks import unknown_name_error
from memfit.strategies.translate_other_frameworks_settings import (
    NOTHING,
    WITHOUT_EFFECT,
    Reader,
    TranslatedSetting,
    batches_per_update_reader,
    check_setting_type,
    ignored_setting,
    read_distributed_optimizer,
    read_grad_clip,
    switch_reader,
)

LIGHTNING_PRECISION: Mapping[Any, Mapping[str, Any]] = {
    "16-mixed": {"dtype": "fp16"},
    "16": {"dtype": "fp16"},
    16: {"dtype": "fp16"},
    "bf16-mixed": {"dtype": "bf16"},
    "bf16-true": {"dtype": "bf16", "autocast": False},
    "32-true": {"dtype": "fp32"},
    "32": {"dtype": "fp32"},
    32: {"dtype": "fp32"},
}
"""Lightning's precisions (lightning/fabric/plugins/precision, 2.6), and the fields that each sets."""

_OWN = "the script's own: create the optimizer yourself"
_WRAPPERS = ("OptimWrapper", "AmpOptimWrapper")
_MIXED_PRECISIONS = ("no", "bf16", "fp16")
_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
_OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw_torch": {},
    "sgd": {},
    "adamw_torch_fused": {"implementation": "fused"},
    "adamw_bnb_8bit": {"bits": 8},
    "adamw_8bit": {"bits": 8},
    "adamw_torch_8bit": {"bits": 8, "backend": "torchao"},
    "adamw_torch_4bit": {"bits": 4},
}
"""HuggingFace's optimizers (transformers/training_args.py, 5.23) that are PyTorch's, or hold less state."""


def _read_optim_wrapper(name: str, given: Any) -> Iterator[TranslatedSetting]:
    """Read MMEngine's ``optim_wrapper`` (mmengine/optim/optimizer, 0.10)."""
    fields = check_setting_type(name, {} if given is None else given, Mapping, "a dict")
    kind = fields.get("type", "OptimWrapper")
    if kind not in _WRAPPERS:
        raise unknown_name_error("an MMEngine wrapper that memfit reads", str(kind), _WRAPPERS)
    is_amp = kind == "AmpOptimWrapper"
    if is_amp and fields.get("dtype") is None:
        yield TranslatedSetting(f"{name}.type={kind!r}", "precision.dtype", "fp16")
    else:
        yield ignored_setting(f"{name}.type", kind)
    for field, value in fields.items():
        if field != "type":
            yield from _wrapper_field(name, field, value, is_amp=is_amp)


def _wrapper_field(name: str, field: str, value: Any, *, is_amp: bool) -> Iterator[TranslatedSetting]:
    path = f"{name}.{field}"
    if field in ("optimizer", "paramwise_cfg", "constructor"):
        yield TranslatedSetting(path, None, note=_OWN)
    elif field in WITHOUT_EFFECT or value is None:
        yield ignored_setting(path, value, WITHOUT_EFFECT.get(field, NOTHING))
    elif field == "accumulative_counts":
        yield from batches_per_update_reader("carry", "MMEngine")(path, value)
    elif field == "clip_grad":
        yield read_grad_clip(path, value)
    elif field == "loss_scale" and is_amp:
        yield TranslatedSetting(f"{path}={value!r}", "precision.loss_scale", value)
    elif field == "dtype" and is_amp:
        if not isinstance(value, str) or value not in _DTYPES:
            raise UsageError(f"{path} must be one of {', '.join(_DTYPES)}, not {value!r}.")
        yield TranslatedSetting(f"{path}={value!r}", "precision.dtype", _DTYPES[value])
    else:
        known = ("accumulative_counts", "clip_grad", *(("dtype", "loss_scale") if is_amp else ()))
        raise unknown_name_error(f"a field of {name}", field, known)


def _read_mixed_precision(name: str, given: Any) -> Iterator[TranslatedSetting]:
    """Read Accelerate's ``mixed_precision`` (accelerate/accelerator.py, 1.15)."""
    if given not in (None, *_MIXED_PRECISIONS):
        known = ", ".join(_MIXED_PRECISIONS)
        raise UsageError(f"{name}={given!r} is not supported: memfit reads {known}.")
    if given in (None, "no"):
        yield ignored_setting(name, given, denies="precision")
    else:
        yield TranslatedSetting(f"{name}={given!r}", "precision.dtype", given)


def _read_clip_norm(name: str, given: Any) -> Iterator[TranslatedSetting]:
    """Read Lightning's ``gradient_clip_val`` and HuggingFace's ``max_grad_norm``, which clip nothing if 0."""
    if given is None or (type(given) is not bool and given == 0):
        yield ignored_setting(name, given, "gradients are not clipped", denies="max_grad_norm")
    else:
        yield TranslatedSetting(f"{name}={given!r}", "max_grad_norm", given)


def _read_gradient_clip_algorithm(name: str, given: Any) -> Iterator[TranslatedSetting]:
    """Read Lightning's ``gradient_clip_algorithm``."""
    if given not in (None, "norm"):
        raise UsageError(f"{name}={given!r} is not supported: memfit clips gradients only by their norm.")
    yield ignored_setting(name, given)


def _read_checkpointing_kwargs(name: str, given: Any) -> Iterator[TranslatedSetting]:
    """Read HuggingFace's ``gradient_checkpointing_kwargs``, which alone switches no checkpointing on."""
    fields = check_setting_type(name, {} if given is None else given, Mapping, "a dict")
    known = ("use_reentrant", "preserve_rng_state")
    for field, value in fields.items():
        if field not in known:
            raise unknown_name_error(f"a field of {name}", field, known)
        given_field = f"{name}.{field}={value!r}"
        yield TranslatedSetting(given_field, f"checkpointing.{field}", value, only_refines=True)
    if not fields:
        yield ignored_setting(name, given)


def _read_optim(name: str, given: Any) -> Iterator[TranslatedSetting]:
    """Read HuggingFace's ``optim``: whether the step is fused, and how many bits the state has."""
    if not isinstance(given, str) or given not in _OPTIMIZERS:
        known = ", ".join(_OPTIMIZERS)
        raise UsageError(
            f"{name}={given!r} is not an optimizer that memfit reads. Leave it out, and create the optimizer "
            f"yourself. memfit reads {known}."
        )
    for target, value in _OPTIMIZERS[given].items():
        yield TranslatedSetting(f"{name}={given!r}", f"optimizer_state.{target}", value)
    if not _OPTIMIZERS[given]:
        yield TranslatedSetting(f"{name}={given!r}", None, note=_OWN)


def _read_gradients_mean(name: str, given: Any) -> Iterator[TranslatedSetting]:
    """Read whether MindSpore averages gradients over devices, or sums them."""
    if check_setting_type(name, given, bool | None, "true or false") is False:
        raise UsageError(
            f"{name}=False sums the gradients of all devices, and memfit averages them. Leave it out on one "
            "device; on several, multiply the loss by their number."
        )
    yield ignored_setting(name, given, "memfit.Sharding averages gradients over ranks" if given else NOTHING)


def _read_parallel_mode(name: str, given: Any) -> Iterator[TranslatedSetting]:
    """Read MindSpore's ``parallel_mode``, of which a single device has one, too."""
    if given not in (None, "stand_alone"):
        raise UsageError(
            f"{name}={given!r} is not read by memfit. Write sharding='ddp' for MindSpore's data_parallel, or "
            "'zero1' or 'fsdp2', which divide what each rank holds (memfit.Sharding)."
        )
    yield ignored_setting(name, given, denies="sharding")


def _ignored_setting_reader(why: str) -> Reader:
    """Return the reader of a setting that needs nothing here."""

    def read(name: str, given: Any) -> Iterator[TranslatedSetting]:
        yield ignored_setting(name, given, why)

    return read


TRAINER_READERS: Mapping[str, Reader] = {
    "optim_wrapper": _read_optim_wrapper,
    "max_grad_norm": _read_clip_norm,
    "gradient_clip_val": _read_clip_norm,
    "mixed_precision": _read_mixed_precision,
    "gradient_clip_algorithm": _read_gradient_clip_algorithm,
    "gradient_checkpointing_kwargs": _read_checkpointing_kwargs,
    "optim": _read_optim,
    "torch_compile": _ignored_setting_reader("compile the model yourself, with torch.compile(model)"),
    "gradients_mean": _read_gradients_mean,
    "parallel_mode": _read_parallel_mode,
    "distributed": read_distributed_optimizer,
    "_delete_": _ignored_setting_reader(WITHOUT_EFFECT["_delete_"]),
    "fp16_enabled": switch_reader(
        "precision.dtype", "fp16"
    ),  # memfit.Precision sets it where auto_fp16 looks for it
}
"""The name of a setting -> how it is read."""
