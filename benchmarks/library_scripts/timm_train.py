"""Train a ConvNeXt with timm: mixup, channels last, AMP, an EMA of the weights, cudnn.benchmark."""

import argparse

import timm
import torch
from timm.data import Mixup, create_loader
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, NativeScaler
from torch.utils.data import Dataset


class Noise(Dataset):
    """Images in memory, as PIL pictures."""

    def __init__(self, length, size):
        import numpy as np
        from PIL import Image

        pixels = np.random.default_rng(0).integers(0, 255, (4, size, size, 3), dtype="uint8")
        self.images = [Image.fromarray(one) for one in pixels]
        self.length = length
        self.transform = None

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.transform(self.images[index % 4]), index % 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="convnext_tiny")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--model-ema", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda")
    model = timm.create_model(args.model, num_classes=1000, drop_path_rate=0.1)
    model.to(device=device, memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    scaler = NativeScaler()
    ema = ModelEmaV3(model, decay=0.9998) if args.model_ema else None
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=1000)
    loader = create_loader(
        Noise(1024, 256),
        input_size=(3, 224, 224),
        batch_size=args.batch_size,
        is_training=True,
        num_workers=2,
        re_prob=0.25,
    )
    scheduler, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=1)
    criterion = SoftTargetCrossEntropy().to(device)
    losses = AverageMeter()

    updates = 0
    for epoch in range(epochs):
        model.train()
        for index, (images, target) in enumerate(loader):
            images, target = mixup(images, target)
            images = images.contiguous(memory_format=torch.channels_last)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(model(images), target)
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
            optimizer.zero_grad()
            updates += 1
            if ema is not None:
                ema.update(model, step=updates)
            losses.update(loss.item(), images.size(0))
            print(f"{index}/{len(loader)} loss {losses.avg:.3f} {torch.cuda.max_memory_allocated():,} B")
        scheduler.step(epoch + 1)


if __name__ == "__main__":
    main()
