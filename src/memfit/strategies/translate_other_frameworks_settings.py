"""Settings under the names of older systems: MMCV 1.x's dicts, HuggingFace's flags, Caffe's ``mem_param``.

Each reader takes the value given under a name and yields the corresponding settings of memfit. Options that
memfit does not have are refused by name.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from memfit.errors import UsageError
from memfit.strategies.setting_checks import unknown_name_error


@dataclass(frozen=True, slots=True)
class TranslatedSetting:
    """One setting: as the user gave it, and under memfit's name."""

    given: str
    """Name and value, as the user wrote them."""
    target: str | None
    """``"precision.dtype"``; ``"checkpointing"`` for a strategy with its defaults; None: nothing to set."""
    value: Any = None
    note: str = ""
    """Why there is nothing to set, or whose default it is."""
    is_default: bool = False
    """Whether it is the older system's default, which any explicit setting overrides."""
    only_refines: bool = False
    """Whether it has no effect unless another setting asks for the same strategy."""
    denies: str = ""
    """A target that must not be set to ``value``, or to anything if ``value`` is None."""


Reader = Callable[[str, Any], Iterator[TranslatedSetting]]

NOTHING = "this is memfit's default"
_EXCHANGE = {
    "coalesce": "memfit.Sharding puts gradients into buckets, too",
    "bucket_size_mb": "memfit.Sharding has bucket_cap_mb",
}
"""Fields of MMCV's hooks for how ranks exchange gradients, and what does that here."""
WITHOUT_EFFECT = {
    "_delete_": "it is for merging configurations",
    "detect_anomalous_params": NOTHING,
}
"""Fields of OpenMMLab's settings that need nothing here, and why."""


def ignored_setting(
    name: str, given: Any, note: str = NOTHING, denies: str = "", value: Any = None
) -> TranslatedSetting:
    """Return a setting that sets nothing, and says why; unless it is None, it may deny a target."""
    return TranslatedSetting(f"{name}={given!r}", None, value, note, denies="" if given is None else denies)


def switch_reader(target: str, value: Any = None) -> Reader:
    """Return the reader of a boolean that switches a target on."""

    def read(name: str, given: Any) -> Iterator[TranslatedSetting]:
        if check_setting_type(name, given, bool | None, "true or false"):
            yield TranslatedSetting(f"{name}={given!r}", target, value)
        else:
            yield ignored_setting(name, given, denies=target, value=value)

    return read


def read_distributed_optimizer(name: str, given: Any) -> Iterator[TranslatedSetting]:
    """Read whether a system's optimizer exchanges gradients between ranks, as MMCV's hooks do."""
    if check_setting_type(name, given, bool | None, "true or false") is False:
        yield ignored_setting(
            name, given, "without memfit.Sharding, ranks exchange nothing", denies="sharding"
        )
    else:
        yield ignored_setting(
            name, given, "where there are several ranks, memfit.Sharding exchanges gradients"
        )


def batches_per_update_reader(remainder: str, origin: str, note: str = "") -> Reader:
    """Return the reader of a number of batches per update, from a system with this remainder.

    ``note`` says in what its origin differs.
    """

    def read(name: str, given: Any) -> Iterator[TranslatedSetting]:
        if given is None:
            yield ignored_setting(name, given)
            return
        yield TranslatedSetting(f"{name}={given!r}", "accumulation.batches_per_update", given, note)
        yield TranslatedSetting(
            f"{name}={given!r}", "accumulation.remainder", remainder, f"the way of {origin}", is_default=True
        )

    return read


def _read_fp16(name: str, given: Any) -> Iterator[TranslatedSetting]:
    """Read ``fp16=True``, and MMCV's ``fp16 = dict(loss_scale=512.)``."""
    if given is None or isinstance(given, bool):
        yield from switch_reader("precision.dtype", "fp16")(name, given)
        return
    fields = check_setting_type(name, given, Mapping, "true, false or a dict such as dict(loss_scale=512.)")
    yield TranslatedSetting(name, "precision.dtype", "fp16")
    yield from _hook(name, fields, ("loss_scale",))
    yield _scale_of_hooks(name)


def _read_optimizer_config(name: str, given: Any) -> Iterator[TranslatedSetting]:
    """Read MMCV's ``optimizer_config = dict(type="GradientCumulativeFp16OptimizerHook", ...)``."""
    fields = check_setting_type(name, {} if given is None else given, Mapping, "a dict")
    if not fields:
        yield ignored_setting(name, given)
    kind = fields.get("type") or "OptimizerHook"
    if not isinstance(kind, str) or kind not in HOOKS:
        raise unknown_name_error("an MMCV hook that memfit reads", kind, HOOKS)
    if "Fp16" in kind:
        yield TranslatedSetting(f"{name}.type={kind!r}", "precision.dtype", "fp16")
        yield _scale_of_hooks(f"{name}.type={kind!r}")
    yield from _hook(name, {field: value for field, value in fields.items() if field != "type"}, HOOKS[kind])


HOOKS = {
    "OptimizerHook": ("grad_clip",),
    "Fp16OptimizerHook": ("grad_clip", "loss_scale"),
    "GradientCumulativeOptimizerHook": ("grad_clip", "cumulative_iters"),
    "GradientCumulativeFp16OptimizerHook": ("grad_clip", "loss_scale", "cumulative_iters"),
}
"""MMCV's hooks (mmcv/runner/hooks/optimizer.py, 1.7), and those of their fields that memfit reads."""


def _scale_of_hooks(given: str) -> TranslatedSetting:
    return TranslatedSetting(given, "precision.loss_scale", 512.0, "MMCV's default", is_default=True)


def _hook(name: str, fields: Mapping[str, Any], known: tuple[str, ...]) -> Iterator[TranslatedSetting]:
    for field, value in fields.items():
        given = f"{name}.{field}={value!r}"
        if field in _EXCHANGE:
            raise UsageError(
                f"{given} is how MMCV exchanges gradients between ranks. Leave it out: {_EXCHANGE[field]}."
            )
        if field == "detect_anomalous_params" and value:
            raise UsageError(
                f"{given} looks for parameters without gradients, which memfit does not: leave it out. With "
                "several ranks, memfit.Sharding(find_unused_parameters=True) trains with them."
            )
        if field == "distributed":
            yield from read_distributed_optimizer(f"{name}.{field}", value)
        elif field in WITHOUT_EFFECT:
            yield ignored_setting(f"{name}.{field}", value, WITHOUT_EFFECT[field])
        elif (
            field not in known
            and name == "optimizer_config"
            and any(field in each for each in HOOKS.values())
        ):
            hooks = " or ".join(repr(hook) for hook, own in HOOKS.items() if field in own)
            raise UsageError(f"{given} is a setting of another hook: add type={hooks} to {name}.")
        elif field not in known:
            raise unknown_name_error(f"a field of {name}", field, known)
        elif field == "grad_clip":
            yield read_grad_clip(f"{name}.{field}", value)
        elif field == "cumulative_iters":
            yield from batches_per_update_reader("carry", "MMCV")(f"{name}.{field}", value)
        else:
            yield TranslatedSetting(given, "precision.loss_scale", value)


def read_grad_clip(name: str, given: Any) -> TranslatedSetting:
    """Read OpenMMLab's ``grad_clip = dict(max_norm=35, norm_type=2)``."""
    if given is None:
        return ignored_setting(name, given, "gradients are not clipped")
    fields = check_setting_type(name, given, Mapping, "None or a dict such as dict(max_norm=35)")
    for field in fields:
        if field not in ("max_norm", "norm_type", "type"):
            raise unknown_name_error(f"a field of {name}", field, ("max_norm", "norm_type", "type"))
    if fields.get("type", "norm") != "norm":
        raise UsageError(f"{name}.type={fields['type']!r} is not supported: memfit clips by the norm only.")
    if "max_norm" not in fields:
        raise UsageError(f"{name}={given!r} needs max_norm.")
    if fields.get("norm_type", 2) != 2:  # noqa: PLR2004 - the Euclidean one
        raise UsageError(
            f"{name}.norm_type={fields['norm_type']!r} is not supported: memfit clips gradients "
            "only by their 2-norm (norm_type=2)."
        )
    return TranslatedSetting(f"{name}={dict(fields)!r}", "max_grad_norm", fields["max_norm"])


def _read_with_cp(name: str, given: Any) -> Iterator[TranslatedSetting]:
    """Read MMDetection's ``with_cp``, which checkpoints the residual blocks of a backbone."""
    if check_setting_type(name, given, bool | None, "true or false"):
        yield TranslatedSetting(f"{name}={given!r}", "checkpointing.blocks", "backbone")
    else:
        yield ignored_setting(name, given, denies="checkpointing")


def _read_nested_with_cp(name: str, given: Any) -> Iterator[TranslatedSetting]:
    """Read ``with_cp`` at any depth of an MMCV model's dict; its other entries are for the model builder.

    Of a part other than the backbone it is refused: MMDetection's ``HRFPN``, a neck, checkpoints a single
    convolution for it, and other parts do otherwise.
    """
    found = list(
        _with_cp(name, check_setting_type(name, given, Mapping | list | tuple, "the dict of a model"))
    )
    for path, value in found:
        (setting,) = _read_with_cp(path, value)
        parts = [part.partition("[")[0] for part in path.split(".")[:-1]]
        if setting.target is not None and len(parts) > 1 and "backbone" not in parts:
            raise UsageError(
                f"{path}={value!r} is not read by memfit, which reads with_cp of backbones. Leave it out, "
                f"and name what to checkpoint there, for example checkpointing=[{f'{parts[1]}.*'!r}]."
            )
        yield replace(setting, denies="")  # another part of the model may have it
    if not found:
        yield TranslatedSetting(
            name, None, note="memfit reads only with_cp from a model, and this model has none"
        )


def _with_cp(path: str, given: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(given, Mapping):
        for name, value in given.items():
            if name == "with_cp":
                yield f"{path}.with_cp", value
            else:
                yield from _with_cp(f"{path}.{name}", value)
    elif isinstance(given, list | tuple):
        for index, value in enumerate(given):
            yield from _with_cp(f"{path}[{index}]", value)


# ---- Caffe's memory multiloading ------------------------------------------------------------------------

_MEM_PARAM = {
    "optimize_train": "arena.optimize_train",
    "optimize_test": "arena.optimize_test",
    "exclude_blob": "arena.exclude",
}
_MEM_PARAM_DEFAULTS = {"optimize_train": True, "optimize_test": False}
"""Source: MemoryOptimizationParameter in src/caffe/proto/caffe.proto of github.com/yjxiong/caffe."""
_BLOCK = re.compile(r"\bmem_param\s*:?\s*\{([^{}]*)\}")
_ENTRY = re.compile(r"""\s*(\w+)\s*:\s*(?:"([^"]*)"|'([^']*)'|(\w+))\s*[,;]?\s*""")


def _read_mem_param(name: str, given: Any) -> Iterator[TranslatedSetting]:
    """Read the memory settings of Caffe's fork, from a dict or a network's text: they set up the arena."""
    fields = parse_caffe_mem_param_block(given) if isinstance(given, str) else given
    for field, value in check_setting_type(
        name, fields, Mapping, "a dict, or a network in Caffe's text format"
    ).items():
        if field not in _MEM_PARAM:
            raise unknown_name_error(f"a field of {name}", field, _MEM_PARAM)
        path = f"{name}.{field}"
        read = (
            _blobs(path, value)
            if field == "exclude_blob"
            else check_setting_type(path, value, bool, "true or false")
        )
        yield TranslatedSetting(f"{path}={value!r}", _MEM_PARAM[field], read)
    for field, default in _MEM_PARAM_DEFAULTS.items():
        if field not in fields:
            yield TranslatedSetting(name, _MEM_PARAM[field], default, "Caffe's default", is_default=True)


def _blobs(name: str, given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
        raise UsageError(f"{name} must be the name of a blob, or a list of names, not {given!r}.")
    return tuple(names)


def parse_caffe_mem_param_block(text: str) -> dict[str, Any]:
    """Read the ``mem_param`` block of a network in Caffe's text format, or only the text between its braces.

    >>> parse_caffe_mem_param_block('mem_param { optimize_train: true exclude_blob: "fc1" }')
    {'optimize_train': True, 'exclude_blob': ['fc1']}
    """
    plain = re.sub(r"#[^\n]*", "", text)
    blocks = _BLOCK.findall(plain)
    if len(blocks) > 1 or (not blocks and ("{" in plain or "mem_param" in plain)):
        raise UsageError(
            f"The network must have exactly one mem_param {{ ... }} block; it has {len(blocks)}."
        )
    body, at = blocks[0] if blocks else plain, 0
    fields: dict[str, Any] = {}
    while body[at:].strip():
        entry = _ENTRY.match(body, at)
        if entry is None:
            raise UsageError(
                f"Cannot parse mem_param at {body[at:].strip()[:40]!r}: expected entries such as "
                "optimize_train: true."
            )
        name, at = entry[1], entry.end()
        value = next(part for part in entry.groups()[1:] if part is not None)
        if name == "exclude_blob":
            fields.setdefault(name, []).append(value)
        else:
            fields[name] = {"true": True, "false": False}.get(value, value)
    return fields


def check_setting_type(name: str, given: Any, kind: Any, what: str) -> Any:
    """Return a value if it has the expected type."""
    if given is None and isinstance(None, kind):
        return given
    if not isinstance(given, kind):
        raise UsageError(f"{name} must be {what}, not {given!r}.")
    return given


_OF_CELLS = (
    "memfit takes their mean and counts on, as MindSpore's library does; the cells of its tutorial take "
    "their sum, and count anew in each epoch"
)

READERS: dict[str, Reader] = {
    "gradient_accumulation_steps": batches_per_update_reader("step", "HuggingFace's Trainer"),
    "accumulate_grad_batches": batches_per_update_reader("step", "Lightning"),
    "accumulative_counts": batches_per_update_reader("carry", "MMEngine"),
    "cumulative_iters": batches_per_update_reader("carry", "MMCV"),
    "mini_steps": batches_per_update_reader("carry", "MindSpore", _OF_CELLS),
    "grad_accumulation_step": batches_per_update_reader("carry", "MindSpore"),
    "accumulate_step": batches_per_update_reader("carry", "MindSpore"),
    "iter_size": batches_per_update_reader("carry", "Caffe"),
    "fp16": _read_fp16,
    "bf16": switch_reader("precision.dtype", "bf16"),
    "optimizer_config": _read_optimizer_config,
    "with_cp": _read_with_cp,
    "model": _read_nested_with_cp,
    "backbone": _read_nested_with_cp,
    "mem_param": _read_mem_param,
}
