"""Predict memory and time of RetinaNet-R50 under every combination of three lines of MMDetection's settings.

    python benchmarks/seed_table.py [--gpu GTX-1660]

    fp16 = dict(loss_scale=512.)
    optimizer_config = dict(type="GradientCumulativeOptimizerHook", cumulative_iters=2)
    model = dict(backbone=dict(with_cp=True))

The model and the images are those of accuracy/retinanet.py, in batches of 2; memfit reads the settings as
they are, and ``fit`` clears gradients after each update. The published figures come from MMDetection on a
real GTX 1660 with PyTorch 1.7.1 and 1300 iterations: 2900, 2243, 3177 and 2590 MB; 7:45, 36:00, 7:32 and 8:37
minutes.

Memory is exact for the assumed number of matching anchors, which depends on values: the maximum; the CUDA
context of the process is assumed. Time is assumed: each operation takes the longer of its arithmetic at the
card's rate for the dtype and its memory traffic at the card's bandwidth. The sum is divided by the number of
samples and given relative to base. The time model ignores kernels: no data sheet shows that this card's fp16
kernels were 4.6 times slower than its fp32 ones.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import MIB, ROOT, command_line, table_head, table_line

import memfit

sys.path.insert(0, str(ROOT / "benchmarks/accuracy"))
from retinanet import HEIGHT, WIDTH, build

UPDATES = 2
"""The first creates the optimizer's state; the second is as all later ones."""
BATCH = 2
AMP = {"fp16": {"loss_scale": 512.0}}
CUMULATIVE = {"optimizer_config": {"type": "GradientCumulativeOptimizerHook", "cumulative_iters": 2}}
BOTH = {"optimizer_config": {"type": "GradientCumulativeFp16OptimizerHook", "cumulative_iters": 2}}
WITH_CP = {"model": {"backbone": {"with_cp": True}}}
ROWS: dict[str, tuple[dict[str, Any], float | None, float | None]] = {
    # name: settings, published memory and time per sample relative to base
    "base": ({}, 1.0, 1.0),
    "AMP": (AMP, 2243 / 2900, (36 * 60) / (7 * 60 + 45)),
    "accumulation": (CUMULATIVE, 3177 / 2900, (7 * 60 + 32) / (7 * 60 + 45)),
    "checkpointing": (WITH_CP, 2590 / 2900, (8 * 60 + 37) / (7 * 60 + 45)),
    "AMP, accumulation": (AMP | BOTH, None, None),
    "AMP, checkpointing": (AMP | WITH_CP, None, None),
    "accumulation, checkpointing": (CUMULATIVE | WITH_CP, None, None),
    "all three": (AMP | BOTH | WITH_CP, None, None),
}


def train(variant: str, counted: str) -> None:
    """Train for a few updates and count the operations of the last: the script that runs on the ghost."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    operations: dict[tuple[int, int, str], int] = {}

    class OperationCounter(TorchDispatchMode):
        """Counts operations other than views, by FLOPs, bytes and dtype."""

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operation(*args, **(kwargs or {}))
            if not operation.is_view:
                tensors = [one for one in tree_leaves((args, kwargs, result)) if torch.is_tensor(one)]
                size = sum(one.nbytes for one in tensors)
                packet = operation._overloadpacket
                count = flop_registry.get(packet)
                flops = count(*args, **(kwargs or {}), out_val=result) if count else 0
                dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "float32"
                key = (int(flops), size, dtype)
                operations[key] = operations.get(key, 0) + 1
            return result

    settings = ROWS[variant][0]
    model = build(checkpointed=False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = memfit.Engine(
        model,
        settings,
        optimizer=torch.optim.SGD(parameters, lr=0.001, momentum=0.9, weight_decay=1e-4, foreach=False),
        loss=lambda model, batch: sum(model(*batch).values()),
    )
    for update in range(UPDATES):
        with OperationCounter() if update == UPDATES - 1 else nullcontext():
            engine.fit(Images(engine.batches_per_update), epochs=update + 1)
    Path(counted).write_text(json.dumps([[*key, times] for key, times in operations.items()]))


@dataclass(frozen=True)
class Images:
    """Batches of images on the GPU, made as they are read."""

    batches: int

    def __len__(self) -> int:
        """Return the number of batches."""
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        """Yield images and their targets."""
        import torch

        for _ in range(self.batches):
            corners = torch.rand(3, 2, device="cuda") * 300
            target = {
                "boxes": torch.cat([corners, corners + 100], dim=1),
                "labels": torch.ones(3, dtype=torch.long, device="cuda"),
            }
            yield [torch.rand(3, HEIGHT, WIDTH, device="cuda") for _ in range(BATCH)], [target] * BATCH


def seconds(operations: list[list[Any]], device: Any) -> float:
    """Return the seconds of an update's operations at the card's rates."""
    dtypes = {"float16": "fp16", "bfloat16": "bf16"}
    total = 0.0
    for flops, size, dtype, times in operations:
        rate = device.rate(dtypes.get(dtype, "fp32"))
        total += times * max(flops / rate, size / device.memory_bandwidth)
    return total


def main() -> None:
    """Print the table."""
    from memfit.devices import find_device

    parser = command_line(__doc__)
    parser.add_argument("--gpu", default="GTX-1660")
    gpu = parser.parse_args().gpu
    device = find_device(gpu)
    columns = (
        "",
        "allocated MiB",
        "reserved",
        "process",
        "of base",
        "published",
        "time per sample",
        "published",
    )
    print(table_head(columns, "lrrrrrrr"), flush=True)
    base: tuple[float, float] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for variant, (settings, memory, time) in ROWS.items():
            counted = Path(folder) / "operations.json"
            result = memfit.dry_run(
                __file__, [variant, str(counted)], gpu=gpu, values="count=upper", steps=UPDATES + 1
            )
            if result.steps != UPDATES:
                sys.exit(f"{variant} ended early: {result.end}")
            samples = BATCH * (2 if "optimizer_config" in settings else 1)
            took = seconds(json.loads(counted.read_text()), device) / samples
            base = base or (result.peak_allocated, took)
            published = [f"{value:.2f}" if value else "" for value in (memory, time)]
            sizes = (result.peak_allocated, result.peak_reserved, result.peak_process.bytes)
            shares = f"{sizes[0] / base[0]:.2f}", published[0], f"{took / base[1]:.2f}", published[1]
            print(table_line((variant, *(f"{size / MIB:,.0f}" for size in sizes), *shares)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ROWS:
        train(*sys.argv[1:])
    else:
        main()
