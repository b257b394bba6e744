"""Train a toy detector whose loss and post-processing choose their boxes by value."""

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import box_iou, nms

BATCH, CLASSES, CELLS = 8, 20, 32 * 32


class Detector(nn.Module):
    """Images [N, 3, 256, 256] -> class logits [N, cells, classes + 1] and boxes [N, cells, 4]."""

    def __init__(self, width=128):
        super().__init__()
        layers, channels = [], 3
        for _ in range(3):
            layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.GroupNorm(8, width), nn.SiLU()]
            channels = width
        self.backbone = nn.Sequential(*layers)
        self.head = nn.Conv2d(width, CLASSES + 1 + 4, 3, padding=1)

    def forward(self, images):
        return self.head(self.backbone(images)).flatten(2).mT.split([CLASSES + 1, 4], dim=2)


def detection_loss(logits, boxes, labels, targets):
    """Cross entropy on every object and three times as many hardest background cells."""
    object_ = labels > 0
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    hardest = loss.detach().masked_fill(object_, 0).sort(dim=1, descending=True).indices.argsort(dim=1)
    chosen = object_ | (hardest < 3 * object_.sum(dim=1, keepdim=True))
    regression = F.smooth_l1_loss(boxes[object_], targets[object_])
    return loss.masked_select(chosen).mean() + regression


@torch.no_grad()
def detect(logits, boxes, threshold=0.05, keep=200):
    """One image: the best boxes, without those that overlap a better one."""
    scores, classes = logits.softmax(dim=1)[:, 1:].max(dim=1)
    index = torch.nonzero(scores > threshold).squeeze(1)
    scores, order = scores[index].topk(min(keep, len(index)))
    centre, size = boxes[index[order]].chunk(2, dim=1)
    corners = torch.cat([centre - size.abs(), centre + size.abs()], dim=1)
    kept = nms(corners, scores, 0.5)
    return corners[kept], classes[index[order]][kept].unique()


torch.manual_seed(0)
device = "cuda"
model = Detector().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

for step in range(3):
    images = torch.randn(BATCH, 3, 256, 256).to(device)
    labels = torch.randint(1, CLASSES + 1, (BATCH, CELLS)).to(device)
    labels[torch.rand(labels.shape, device=device) > 0.02] = 0
    targets = torch.rand(BATCH, CELLS, 4).to(device)

    logits, boxes = model(images)
    loss = detection_loss(logits, boxes, labels, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

    found, classes = detect(logits[0], boxes[0])
    overlap = box_iou(found, targets[0][labels[0] > 0])
    print(f"step {step}  loss {loss.item():.4f}  {len(classes)} classes  overlaps {tuple(overlap.shape)}")

print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
