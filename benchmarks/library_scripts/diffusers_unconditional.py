"""Unconditional image generation: a UNet with EMA weights, accelerate and a cosine schedule."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __init__(self, resolution):
        self.resolution = resolution

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        image = torch.zeros(3, self.resolution, self.resolution)
        image[index % 3, : 8 + index % self.resolution] = 1.0
        return {"input": image * 2 - 1}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--train_batch_size", type=int, default=16)
    parser.add_argument("--num_epochs", type=int, default=1)
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision="fp16")
    model = UNet2DModel(
        sample_size=args.resolution,
        layers_per_block=2,
        block_out_channels=(128, 128, 256, 256, 512, 512),
        down_block_types=("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
    )
    ema_model = EMAModel(
        model.parameters(),
        decay=0.9999,
        use_ema_warmup=True,
        model_cls=UNet2DModel,
        model_config=model.config,
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6)
    loader = DataLoader(Squares(args.resolution), batch_size=args.train_batch_size, shuffle=True)
    lr_scheduler = get_scheduler(
        "cosine", optimizer, num_warmup_steps=500, num_training_steps=len(loader) * args.num_epochs
    )
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    ema_model.to(accelerator.device)

    for epoch in range(args.num_epochs):
        model.train()
        for step, batch in enumerate(loader):
            clean = batch["input"]
            noise = torch.randn(clean.shape, device=clean.device)
            timesteps = torch.randint(0, 1000, (clean.shape[0],), device=clean.device).long()
            noisy = noise_scheduler.add_noise(clean, noise, timesteps)
            with accelerator.accumulate(model):
                prediction = model(noisy, timesteps).sample
                loss = F.mse_loss(prediction.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema_model.step(model.parameters())
            print(f"step {step} loss {loss.detach().item():.4f} {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
