"""The best hand-written loop beside the engine, strategy by strategy: what each has allocated at its peak.

A small GPT and a small CNN train for three steps with AdamW on the ghost, under each strategy: in a
hand-written loop, with ``engine.step`` and with ``engine.windows``. The hand-written loop is an expert's: its
micro-batches are views, it frees the loss before the next forward, sets gradients to None, and keeps reported
values (mean loss, norm) on the GPU.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.strategies.accumulation import Accumulation
from memfit.strategies.apply import apply
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.offload import Offload
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.precision import LossScale, Precision
from memfit.train.engine import Engine

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
STEPS, SAMPLES, PARTS = 3, 8, 4
SCALE = {"init_scale": 1024.0, "growth_interval": 1000}
STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation of 4": {"parts": PARTS},
    "clipped": {"clip": 1.0},
    "bf16 autocast": {"autocast": "bf16"},
    "fp16 autocast, loss scale": {"autocast": "fp16"},
    "fp16 autocast, accumulation, clipped": {"autocast": "fp16", "parts": PARTS, "clip": 1.0},
    "pure bf16": {"cast": "bf16"},
    "pure bf16, accumulation of 4": {"cast": "bf16", "parts": PARTS},
    "bf16, float32 masters": {"cast": "bf16", "masters": True},
    "bf16, float32 masters, accumulation of 4": {"cast": "bf16", "masters": True, "parts": PARTS},
    "stepped in backward": {"in_backward": True},
    "checkpointed": {"blocks": True},
    "offloaded": {"offload": True},
    "checkpointed, bf16 autocast, accumulation, clipped": {
        "blocks": True,
        "autocast": "bf16",
        "parts": PARTS,
        "clip": 1.0,
    },
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def model_and_data(name: str) -> tuple[nn.Module, Callable[[nn.Module, Any], torch.Tensor], Any]:
    """Return a model on the GPU, its mean loss, and a batch."""
    if name == "gpt":
        from gpt import GPT

        model = GPT(vocabulary=5003, context=256, layers=4, heads=4, width=256).cuda()
        text = torch.randint(5003, (SAMPLES, 257), device="cuda")
        return model, lambda model, part: model(part[:, :-1], part[:, 1:]), text
    layers: list[nn.Module] = []
    for channels in ((3, 64), (64, 64), (64, 128)):
        convolution = nn.Conv2d(*channels, 3, padding=1)
        norm, relu = nn.GroupNorm(8, channels[1]), nn.ReLU(inplace=True)
        layers.append(nn.Sequential(convolution, norm, relu, nn.MaxPool2d(2)))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 8 * 8, 1000)).cuda()
    images = torch.randn(SAMPLES, 3, 64, 64, device="cuda")
    labels = torch.randint(1000, (SAMPLES,), device="cuda")

    def loss(model: nn.Module, part: Any) -> torch.Tensor:
        images = part[0].to(next(model.parameters()).dtype)
        return nn.functional.cross_entropy(model(images), part[1])

    return model, loss, (images, labels)


def train(name: str, strategy: str, entry: str) -> dict[str, int]:
    """Train for a few steps on this GPU; return the peaks and the final allocated bytes."""
    settings = STRATEGIES[strategy]
    model, loss, batch = model_and_data(name)
    kept = {"by hand": by_hand, "step": by_step, "windows": by_windows}[entry](model, loss, batch, **settings)
    peaks = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "left": torch.cuda.memory_allocated(),
    }
    del kept
    return peaks


def parts_of(batch: Any, parts: int) -> Iterator[Any]:
    """Yield the micro-batches of a batch, as views."""
    if isinstance(batch, torch.Tensor):
        yield from batch.chunk(parts)
    else:
        yield from zip(*(one.chunk(parts) for one in batch), strict=True)


# ---- Entry points --------------------------------------------------------------------------------------


def by_step(model: nn.Module, loss: Any, batch: Any, **settings: Any) -> Any:
    """Train with ``engine.step``."""
    engine = engine_of(model, loss, **settings)
    result = None
    for _ in range(STEPS):
        del result
        result = engine.step(batch)
    return engine, result


def by_windows(model: nn.Module, loss: Any, batch: Any, **settings: Any) -> Any:
    """Train in a loop over ``engine.windows``."""
    engine = engine_of(model, None, gathers=True, **settings)
    for _ in range(STEPS):
        for window in engine.windows(list(parts_of(batch, settings.get("parts", 1)))):
            for part in window:
                with engine.autocast():
                    mean = loss(model, part)
                engine.backward(mean)
                del mean
    return engine, window.result


def engine_of(  # noqa: PLR0913 - each is a setting
    model: nn.Module,
    loss: Any,
    *,
    parts: int = 1,
    gathers: bool = False,
    clip: float | None = None,
    autocast: str | None = None,
    cast: str | None = None,
    masters: bool = False,
    in_backward: bool = False,
    blocks: bool = False,
    offload: bool = False,
) -> Engine:
    """Return the engine of a strategy."""
    plan: list[Any] = []
    if parts > 1:
        plan.append(Accumulation(**{"batches_per_update" if gathers else "parts_per_batch": parts}))
    scale = LossScale(**SCALE) if "fp16" in (autocast, cast) else None
    if autocast or cast:
        plan.append(Precision(autocast or cast, not cast, scale, master_weights=masters))
    if blocks:
        plan.append(Checkpointing("blocks.*" if hasattr(model, "blocks") else ("0", "1", "2")))
    if offload:
        plan.append(Offload())
    if in_backward:
        plan.append(OptimizerState(step_in_backward=True))
    optimizer = torch.optim.AdamW(model.parameters())
    return Engine(model, plan, optimizer=optimizer, loss=loss, max_grad_norm=clip)


def by_hand(  # noqa: C901, PLR0913 - one loop for all strategies, as it would be in a script
    model: nn.Module,
    loss: Any,
    batch: Any,
    *,
    parts: int = 1,
    clip: float | None = None,
    autocast: str | None = None,
    cast: str | None = None,
    masters: bool = False,
    in_backward: bool = False,
    blocks: bool = False,
    offload: bool = False,
) -> Any:
    """Train in the hand-written loop of an expert."""
    parameters = list(model.parameters())
    full = [nn.Parameter(one.detach().clone()) for one in parameters] if masters else parameters
    if cast:
        for one in parameters:
            one.data = one.data.to(DTYPES[cast])
    optimizer = torch.optim.AdamW(full)
    sums = float32_sums(parameters, full) if cast and (masters or parts > 1) else None
    if blocks:
        for block in model.blocks if hasattr(model, "blocks") else list(model)[:3]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if offload:  # tests/strategies compares offload itself with hand-written loops
        apply(model, Offload())
    if in_backward:
        optimizer = stepped_in_backward(parameters)
    scaler = torch.amp.GradScaler("cuda", enabled=autocast == "fp16", **SCALE)
    context = torch.autocast("cuda", DTYPES[autocast]) if autocast else contextlib.nullcontext()
    total = norm = None
    for _ in range(STEPS):
        total = norm = None
        for part in parts_of(batch, parts):
            with context:
                mean = loss(model, part)
            scaled = scaler.scale(mean / parts if parts > 1 else mean)
            total = mean.detach() if total is None else total.add_(mean.detach())
            del mean
            scaled.backward()
            del scaled
        total = total / parts
        if sums is not None:
            sums()
        scaler.unscale_(optimizer) if scaler.is_enabled() else None
        norm = nn.utils.clip_grad_norm_(full, clip) if clip else None
        if not in_backward:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(parameters, full)
    return model, optimizer, total, norm


def float32_sums(parameters: list[nn.Parameter], full: list[nn.Parameter]) -> Callable[[], None]:
    """Sum gradients in float32 as they arrive; return the function that hands them to the optimizer."""
    found: dict[nn.Parameter, torch.Tensor] = {}

    def take(parameter: Any) -> None:
        gradient, parameter.grad = parameter.grad, None
        if parameter in found:
            found[parameter].add_(gradient)
        else:
            found[parameter] = gradient.float()

    def hand_over() -> None:
        for parameter, home in zip(parameters, full, strict=True):
            home.grad = found.pop(parameter).to(home.dtype)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(take)
    return hand_over


def stepped_in_backward(parameters: list[nn.Parameter]) -> Any:
    """Step each parameter in backward, with one optimizer per parameter, as PyTorch's tutorial does."""
    optimizers = {one: torch.optim.AdamW([one]) for one in parameters}

    def step(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for one in parameters:
        one.register_post_accumulate_grad_hook(step)
    return optimizers
