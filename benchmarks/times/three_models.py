"""Train ViT-H/14, CLIP-L/14 at 336 or GPT-2 large with Adam on random data made on the GPU in each step.

Precisions: FP float32; MP autocast to float16, without a loss scaler; HP weights in float16. Every tensor of
a step lives until the update is over, as the author's do. times.toml names the version of transformers.
"""

import argparse
from contextlib import nullcontext

import timm
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from torch import nn
from torch.distributed._composable import checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, CLIPConfig, CLIPModel, GPT2Config

CHECKPOINTED = {"Block", "CLIPEncoderLayer", "GPT2Block"}


class CLIP(nn.Module):
    """CLIP with its contrastive loss, whose temperature is learnt."""

    def __init__(self):
        super().__init__()
        text = {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "projection_dim": 768,
        }
        vision = {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 336,
            "projection_dim": 768,
        }
        self.clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=768))
        self.logit_scale = nn.Parameter(torch.tensor(2.659))

    def forward(self, images, tokens, mask):
        found = self.clip(input_ids=tokens, attention_mask=mask, pixel_values=images)
        image, text = F.normalize(found.image_embeds, dim=-1), F.normalize(found.text_embeds, dim=-1)
        targets = torch.arange(len(image), device=image.device)
        scale = self.logit_scale.exp()
        logits_of_images, logits_of_texts = image @ text.t() * scale, text @ image.t() * scale
        return (F.cross_entropy(logits_of_images, targets) + F.cross_entropy(logits_of_texts, targets)) / 2


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["vit", "clip", "gpt2"])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=1024, help="of GPT-2")
    parser.add_argument("--precision", choices=["FP", "MP", "HP"], default="FP")
    parser.add_argument("--checkpointing", action="store_true", help="of every block")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    batch, device = args.batch_size, torch.device("cuda")
    dtype = torch.float16 if args.precision == "HP" else torch.float32
    torch.set_default_dtype(dtype)
    with device:
        if args.model == "vit":
            model = timm.create_model("vit_huge_patch14_clip_224", num_classes=1000)
            optimizer = create_optimizer_v2(model, opt="adam")
        elif args.model == "clip":
            model = CLIP()
        else:
            config = GPT2Config(n_embd=1280, n_layer=36, n_head=20)
            model = AutoModelForCausalLM.from_config(config)
    model.to(dtype).train()
    if args.model != "vit":
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, weight_decay=1e-4, eps=1e-6)
    if args.checkpointing:
        for module in model.modules():
            if type(module).__name__ in CHECKPOINTED:
                checkpoint(module, preserve_rng_state=False)

    def loss_of_new_batch():
        if args.model == "gpt2":
            tokens = torch.randint(50257, (batch, args.sequence), device=device)
            labels = torch.randint(50257, (batch, args.sequence), device=device)
            with precision:
                return model(input_ids=tokens, labels=labels).loss, tokens, labels
        if args.model == "clip":
            images = torch.randn(batch, 3, 336, 336, dtype=dtype, device=device)
            tokens = torch.randint(49408, (batch, 20), device=device)
            with precision:
                return model(images, tokens, torch.ones_like(tokens)), images, tokens
        images = torch.randn(batch, 3, 224, 224, dtype=dtype, device=device)
        targets = torch.randint(1000, (batch,), device=device)
        with precision:
            output = model(images)
            return F.cross_entropy(output, targets), images, targets, output

    precision = torch.autocast("cuda", torch.float16) if args.precision == "MP" else nullcontext()
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    for _ in range(args.steps):
        with sdpa_kernel(backends):
            loss, *others = loss_of_new_batch()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss, others

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
