"""Train a YOLO detector from its yaml, with ultralytics' trainer, on a synthetic data set."""

import argparse
import tempfile
from pathlib import Path

import cv2
import numpy as np
import torch
import yaml
from ultralytics import YOLO


def write_dataset(folder, train=64, val=8):
    """Write pictures with one bright box each, and their labels, in YOLO's layout."""
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        (folder / "images" / split).mkdir(parents=True)
        (folder / "labels" / split).mkdir(parents=True)
        for number in range(count):
            image = random.integers(0, 255, (320, 320, 3), dtype=np.uint8)
            image[80:200, 100:260] = 255
            cv2.imwrite(str(folder / "images" / split / f"{number}.jpg"), image)
            label = f"{number % 2} 0.5625 0.4375 0.5 0.375\n"
            (folder / "labels" / split / f"{number}.txt").write_text(label)
    description = {"path": str(folder), "train": "images/train", "val": "images/val"}
    description["names"] = {0: "box", 1: "crate"}
    (folder / "data.yaml").write_text(yaml.safe_dump(description))
    return folder / "data.yaml"


def report(trainer):
    print(f" peak {torch.cuda.max_memory_allocated():,} B")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="yolov8m.yaml")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--imgsz", type=int, default=320)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_dataset(folder)
        model = YOLO(args.model)
        model.add_callback("on_train_batch_end", report)
        model.train(
            data=str(data),
            epochs=args.epochs,
            batch=args.batch,
            imgsz=args.imgsz,
            device=0,
            workers=0,
            amp=False,
            pretrained=False,
            plots=False,
            optimizer="SGD",
            project=str(folder / "runs"),
        )


if __name__ == "__main__":
    main()
