"""The scripts of others that foreign_plans.py plans: where each is in a folder of clones, data and command.

A script's options make it small enough for a CPU, and its activations large enough that an expert reaches
45 % of its need: parameters, their state and the CUDA context are a part of it that stays.
"""

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class ForeignScript:
    """A script as its repository has it, which is not edited."""

    name: str
    repository: str
    """On GitHub, with the commit that the results were made with."""
    folder: str
    """The folder of the clone, or one in it, in which the script is started: a copy."""
    command: tuple[str, ...]
    """The script and its arguments."""
    prepare: Callable[[Path], None]
    """Makes the data in the copied folder."""
    on_cpu: tuple[str, ...] = ()
    """Arguments with which it trains on a CPU, if it does not choose the device itself."""
    packages: tuple[str, ...] = ()
    """Needed besides torch."""
    gpu: str = "A100-80GB"
    """The card that is assumed."""
    asserts_gpu: bool = False
    """Whether it refuses to train on a CPU: torch.cuda.is_available() then returns True to it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[float, str] = field(default_factory=dict)
    """By share of the need: why no plan fits, in the words of an expert."""


def write_text(path: Path) -> None:
    """Write 4,000 lines of words in random order."""
    words = ["the", "ghost", "of", "a", "tensor", "and", "king", "shall", "not", "pass", "O God, O God!"]
    chosen = random.Random(0)  # noqa: S311 - text to train on
    path.write_text("\n".join(" ".join(chosen.choices(words, k=9)) for _ in range(4000)))


def write_images(folder: Path, count: int, size: int, *, mask: str = "") -> None:
    """Write square images of random pixels; masks of two classes if ``mask`` is the end of their names."""
    from PIL import Image

    folder.mkdir(parents=True)
    numbers = np.random.default_rng(len(str(folder)))
    for number in range(count):
        colours = numbers.integers(0, 256, (size, size, 3), dtype=np.uint8)
        pixels = 255 * (colours[:, :, 0] // 128) if mask else colours
        Image.fromarray(pixels).save(folder / f"{number:03}{mask}.png")


def _nano_gpt(folder: Path) -> None:
    data = folder / "data/shakespeare_char"
    write_text(data / "input.txt")  # the script downloads no text then
    subprocess.run([sys.executable, data / "prepare.py"], check=True, capture_output=True)


def _min_gpt(folder: Path) -> None:
    write_text(folder / "input.txt")


def _image_net(folder: Path, count: int) -> None:
    shutil.copy(Path(__file__).parent / "foreign_plans/imagenet_groupnorm.py", folder)
    for part, images in (("train", count), ("val", 2)):
        for name in ("cat", "dog"):
            write_images(folder / "data" / part / name, images // 2, 32)


def _unet(folder: Path) -> None:
    shutil.rmtree(folder / "data", ignore_errors=True)
    write_images(folder / "data/imgs", 30, 128)
    write_images(folder / "data/masks", 30, 128, mask="_mask")


def _dit(folder: Path) -> None:
    """Make the folder that has the name of the model which the script would download."""
    from diffusers.models import AutoencoderKL

    for name in ("cat", "dog"):
        write_images(folder / "data" / name, 96, 32)
    levels = 4  # the script's latents are 8 times smaller than its images
    AutoencoderKL(
        block_out_channels=(8,) * levels,
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
    ).save_pretrained(folder / "stabilityai/sd-vae-ft-ema")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_IMAGE_NET = "data -j 0 --seed 0 --epochs 1 -p 1"
_ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29517",
}
"""What torchrun sets for one process."""
SCRIPTS = (
    ForeignScript(
        "nanoGPT",
        "karpathy/nanoGPT at 3adf61e",
        "nanoGPT",
        _words(
            "train.py --dataset=shakespeare_char --compile=False --dtype=float32 --batch_size=192 "
            "--gradient_accumulation_steps=1 --n_layer=4 --n_head=4 --n_embd=128 --block_size=256 "
            "--eval_iters=1 --warmup_iters=2"
        ),
        _nano_gpt,
        on_cpu=("--device=cpu", "--max_iters=1"),
        packages=("numpy", "requests"),
    ),
    ForeignScript(
        "minGPT",
        "karpathy/minGPT at 37baab7",
        "minGPT",
        _words(
            "-m projects.chargpt.chargpt --model.model_type=gpt-nano --data.block_size=256 "
            "--trainer.batch_size=96 --trainer.num_workers=0 --model.embd_pdrop=0.0 --model.resid_pdrop=0.0 "
            "--model.attn_pdrop=0.0"
        ),
        _min_gpt,
        on_cpu=("--trainer.max_iters=11",),  # it prints each tenth loss
        gpu="T4",
    ),
    ForeignScript(
        "imagenet-batchnorm",
        "pytorch/examples at 77f55b9",
        "examples/imagenet",
        _words(f"main.py {_IMAGE_NET} -a resnet50 -b 16"),
        partial(_image_net, count=48),
        packages=("torchvision",),
        gpu="T4",
    ),
    ForeignScript(
        "imagenet-groupnorm",
        "pytorch/examples at 77f55b9",
        "examples/imagenet",
        _words(f"imagenet_groupnorm.py {_IMAGE_NET} -a resnet18_gn -b 48"),
        partial(_image_net, count=96),
        packages=("torchvision",),
        gpu="T4",
    ),
    ForeignScript(
        "Pytorch-UNet",
        "milesial/Pytorch-UNet at 21d7850",
        "Pytorch-UNet",
        _words("train.py -e 1 -b 8 -s 1.0 -v 20"),
        _unet,
        packages=("wandb", "tqdm", "pillow", "matplotlib"),
        gpu="T4",
        environment={"WANDB_MODE": "disabled"},
        refused={
            0.45: "batch normalization permits no slices, and the context, the weights with their gradients, "
            "and what one block of full resolution saves and computes exceed it"
        },
    ),
    ForeignScript(
        "DiT",
        "facebookresearch/DiT at ed81ce2",
        "DiT",
        _words(
            "train.py --data-path data --model DiT-S/4 --num-classes 10 --global-batch-size 64 "
            "--num-workers 0 --log-every 1 --epochs 1"
        ),
        _dit,
        packages=("diffusers", "timm", "torchvision"),
        gpu="T4",
        asserts_gpu=True,
        environment=_ONE_RANK,
    ),
)
