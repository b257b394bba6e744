"""Fine-tune a Mask R-CNN for two classes, with the training loop of torchvision's references."""

import argparse
import math
import sys

import torch
import torchvision
from torch.utils.data import DataLoader, Dataset
from torchvision.models.detection import maskrcnn_resnet50_fpn
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor


class People(Dataset):
    """Pictures of different sizes with one to three boxes."""

    def __len__(self):
        return 170

    def __getitem__(self, index):
        height, width, count = 300 + index % 5 * 40, 360 + index % 7 * 30, 1 + index % 3
        image = torch.full((3, height, width), (index % 10) / 10)
        boxes = torch.tensor([[20.0 + 60 * at, 30.0, 120.0 + 60 * at, 250.0] for at in range(count)])
        masks = torch.zeros(count, height, width, dtype=torch.uint8)
        for mask, box in zip(masks, boxes.int().tolist()):
            mask[box[1] : box[3], box[0] : box[2]] = 1
        labels = torch.ones(count, dtype=torch.int64)
        target = {"boxes": boxes, "labels": labels, "masks": masks, "image_id": index}
        target["area"] = torchvision.ops.box_area(boxes)
        target["iscrowd"] = torch.zeros(count, dtype=torch.int64)
        return image, target


def build_model(num_classes):
    model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None)
    features = model.roi_heads.box_predictor.cls_score.in_features
    model.roi_heads.box_predictor = FastRCNNPredictor(features, num_classes)
    channels = model.roi_heads.mask_predictor.conv5_mask.in_channels
    model.roi_heads.mask_predictor = MaskRCNNPredictor(channels, 256, num_classes)
    return model


def train_one_epoch(model, optimizer, loader, device, epoch):
    model.train()
    warmup = min(1000, len(loader) - 1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 1000, total_iters=warmup)
    for step, (images, targets) in enumerate(loader):
        images = [image.to(device) for image in images]
        targets = [
            {
                name: value.to(device) if isinstance(value, torch.Tensor) else value
                for name, value in one.items()
            }
            for one in targets
        ]
        losses = model(images, targets)
        total = sum(losses.values())
        value = total.item()
        if not math.isfinite(value):
            print(f"loss is {value}: stopping")
            sys.exit(1)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        schedule.step()
        print(
            f"epoch {epoch} [{step}/{len(loader)}] loss {value:.4f} {torch.cuda.max_memory_allocated():,} B"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    loader = DataLoader(People(), args.batch_size, shuffle=True, collate_fn=lambda batch: tuple(zip(*batch)))
    model = build_model(2).to(device)
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.005, momentum=0.9, weight_decay=0.0005)
    for epoch in range(2):
        train_one_epoch(model, optimizer, loader, device, epoch)


if __name__ == "__main__":
    main()
