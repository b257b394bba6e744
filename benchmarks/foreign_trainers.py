"""Scripts of others that train with a library, or with sequences first: more rows for foreign_plans.py."""

import json
import random
import shlex
from pathlib import Path

from foreign_scripts import ForeignScript, write_images

_VOCABULARY = [f"w{number}" for number in range(300)]


def _words(command: str) -> tuple[str, ...]:
    return tuple(shlex.split(command))


def _lines(count: int, least: int, most: int) -> list[str]:
    """Return lines of random words, so many in each."""
    chosen = random.Random(0)  # noqa: S311 - text to train on
    return [" ".join(chosen.choices(_VOCABULARY, k=chosen.randint(least, most))) for _ in range(count)]


def _corpus(folder: Path) -> None:
    data = folder / "data/tiny"
    data.mkdir(parents=True)
    for name, count in (("train", 9500), ("valid", 40), ("test", 40)):
        (data / f"{name}.txt").write_text("\n".join(_lines(count, 19, 19)) + "\n")


def _image_folders(folder: Path) -> None:
    for split, count in (("train", 96), ("validation", 2)):
        for name in ("a", "b"):
            write_images(folder / "images" / split / name, count, 64)


def _unet(folder: Path) -> None:
    from diffusers import UNet2DModel

    write_images(folder / "images", 168, 32)
    UNet2DModel(
        sample_size=32,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ).save_config(folder / "unet")


def _instructions(folder: Path) -> None:
    """Write a Llama of 0.8 M parameters, its tokenizer, and instructions with answers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>", "bos_token": "<s>"}
    numbers = {word: number for number, word in enumerate([*special.values(), *_VOCABULARY])}
    split = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))  # noqa: S106 - a word
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=split, **special).save_pretrained(folder / "llama")
    config = LlamaConfig(
        vocab_size=len(numbers),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=3,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    (folder / "data").mkdir()
    rows = zip(_lines(768, 20, 60), _lines(768, 60, 140), strict=True)
    texts = [{"instruction": one, "output": other, "text": f"{one} {other}"} for one, other in rows]
    (folder / "data/train.jsonl").write_text("\n".join(map(json.dumps, texts)))


_TRAINER = (
    "--output_dir out --per_device_train_batch_size 256 --max_steps 3 --logging_steps 1 --report_to none "
    "--save_strategy no --learning_rate 1e-3 --lr_scheduler_type constant"
)
_CARD = "RTX-3060"
"""Its context is smaller than that of a larger card: what a plan cannot change is a smaller part."""
TRAINERS = (
    ForeignScript(
        "word_language_model",
        "pytorch/examples at 77f55b9",
        "examples/word_language_model",
        _words(
            "main.py --data data/tiny --accel --use-optimizer --lr 0.001 --dropout 0 --batch_size 1024 "
            "--emsize 128 --nhid 128 --nlayers 3 --epochs 1 --log-interval 1"
        ),
        _corpus,
        gpu=_CARD,
    ),
    ForeignScript(
        "timm, ViT",
        "huggingface/pytorch-image-models at aa4b585",
        "pytorch-image-models",
        _words(
            "train.py --data-dir images --model vit_tiny_patch16_224 --model-kwargs patch_size=8 img_size=64 "
            "--img-size 64 --num-classes 2 -b 64 --opt adamw --lr 1e-3 --sched cosine --warmup-lr 1e-3 "
            "--warmup-epochs 0 --epochs 1 --no-aug --workers 1 --log-interval 1 --smoothing 0 "
            "--output out --experiment run"
        ),
        _image_folders,
        on_cpu=("--device", "cpu"),
        packages=("timm", "torchvision"),
        gpu=_CARD,
    ),
    ForeignScript(
        "Trainer, LoRA",
        "huggingface/peft at 5d602fd",
        "peft/examples/corda_finetuning",
        _words(
            "corda_finetuning.py --corda_mode False --lora_r 8 --model_name_or_path llama --data_path data "
            "--dataset_split train --dataset_field instruction output --dataloader_num_proc 1 "
            f"--model_max_length 256 {_TRAINER}"
        ),
        _instructions,
        packages=("transformers", "datasets", "accelerate", "peft"),
        gpu=_CARD,
    ),
    ForeignScript(
        "TRL, SFT",
        "huggingface/trl at f2cd577",
        "trl/trl/scripts",
        _words(
            "sft.py --model_name_or_path llama --dataset_name data --max_length 256 --bf16 False "
            f"--gradient_checkpointing False {_TRAINER}"
        ),
        _instructions,
        packages=("trl", "transformers", "datasets", "accelerate"),
        gpu=_CARD,
    ),
    ForeignScript(
        "diffusers, U-Net",
        "huggingface/diffusers at 58eb52c",
        "diffusers/examples/unconditional_image_generation",
        _words(
            "train_unconditional.py --train_data_dir images --model_config_name_or_path unet --resolution 32 "
            "--center_crop --train_batch_size 56 --num_epochs 1 --eval_batch_size 1 "
            "--ddpm_num_inference_steps 2 --output_dir out --learning_rate 1e-3 --lr_warmup_steps 0 "
            "--lr_scheduler constant"
        ),
        _unet,
        packages=("diffusers", "accelerate", "datasets", "torchvision", "tensorboard"),
        gpu=_CARD,
    ),
)
