"""Predict the memory and time of RetinaNet-R50 under the strategies of a published table.

    python benchmarks/seed_table.py [--gpu GTX-1660]

The model and the images are those of benchmarks/retinanet.py; here memfit's engine applies the strategies
and clears gradients after each update. The published figures come from MMDetection on a real GTX 1660 with
PyTorch 1.7.1 and 1300 iterations: 2900, 2243, 3177 and 2590 MB; 7:45, 36:00, 7:32 and 8:37 minutes.

Memory is exact for the assumed number of matching anchors, which depends on values: the maximum. Time is
assumed: each operation takes the longer of its arithmetic at the card's rate for the dtype and its memory
traffic at the card's bandwidth. The sum is divided by the number of samples and given relative to base. The
time model ignores kernels: no data sheet shows that this card's fp16 kernels were 4.6 times slower than its
fp32 ones.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from retinanet import HEIGHT, WIDTH, build

import memfit

STEPS = 3
MIB = 1 << 20
PLANS: dict[str, tuple[int, list[Any], float | None, float | None]] = {
    # variant: samples per update, plan, published memory and time per sample relative to base
    "base": (2, [], 1.0, 1.0),
    "AMP": (2, ["precision"], 2243 / 2900, (36 * 60) / (7 * 60 + 45)),
    "accumulation 2 x 2": (4, ["accumulation"], 3177 / 2900, (7 * 60 + 32) / (7 * 60 + 45)),
    "accumulation 2 x 1": (2, ["accumulation"], None, None),
    "checkpointed": (2, ["checkpointing"], 2590 / 2900, (8 * 60 + 37) / (7 * 60 + 45)),
    "all, 2 x 1": (2, ["precision", "accumulation", "checkpointing"], None, None),
}


def settings(names: list[str]) -> list[Any]:
    """Return the settings of strategies."""
    every = {
        "precision": memfit.Precision("fp16"),
        "accumulation": memfit.Accumulation(parts_per_batch=2),
        "checkpointing": memfit.Checkpointing("Bottleneck"),
    }
    return [every[name] for name in names]


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

    samples, names, _, _ = PLANS[variant]
    model = build(checkpointed=False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = memfit.Engine(
        model,
        settings(names),
        optimizer=torch.optim.SGD(parameters, lr=0.001, momentum=0.9, weight_decay=1e-4, foreach=False),
        loss=lambda model, batch: sum(model(*batch).values()),
        size=lambda batch: len(batch[0]),
        split=split,
    )
    for step in range(STEPS):
        images = [torch.rand(3, HEIGHT, WIDTH, device="cuda") for _ in range(samples)]
        corners = torch.rand(3, 2, device="cuda") * 300
        target = {
            "boxes": torch.cat([corners, corners + 100], dim=1),
            "labels": torch.ones(3, dtype=torch.long, device="cuda"),
        }
        if step == STEPS - 1:
            with OperationCounter():
                engine.step((images, [target] * samples))
        else:
            engine.step((images, [target] * samples))
    Path(counted).write_text(json.dumps([[*key, times] for key, times in operations.items()]))


def split(batch: Any, sizes: list[int]) -> list[Any]:
    """Split images and targets into parts."""
    images, targets = iter(batch[0]), iter(batch[1])
    return [([next(images) for _ in range(size)], [next(targets) for _ in range(size)]) for size in sizes]


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

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="GTX-1660")
    gpu = parser.parse_args().gpu
    device = find_device(gpu)
    print(
        f"{'':<20}{'MiB (exact)':>12}{'of base':>9}{'published':>10}"
        f"{'time per sample (assumed)':>27}{'published':>10}"
    )
    base: tuple[float, float] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for variant, (samples, _, memory, time) in PLANS.items():
            counted = Path(folder) / "operations.json"
            result = memfit.dry_run(
                __file__, [variant, str(counted)], gpu=gpu, values="count=upper", steps=STEPS + 1
            )
            if result.steps != STEPS:
                sys.exit(f"{variant} ended early: {result.end}")
            peak = result.peak_allocated / MIB
            took = seconds(json.loads(counted.read_text()), device) / samples
            base = base or (peak, took)
            published = [f"{value:.2f}" if value else "" for value in (memory, time)]
            print(
                f"{variant:<20}{peak:>12,.0f}{peak / base[0]:>9.2f}{published[0]:>10}"
                f"{took / base[1]:>27.2f}{published[1]:>10}",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in PLANS:
        train(*sys.argv[1:])
    else:
        main()
