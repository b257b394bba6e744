"""Train a vision transformer with Lightning's Trainer: mixed precision, clipping, checkpoints, validation."""

import argparse
import tempfile

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import vit_b_16


class Classifier(L.LightningModule):
    def __init__(self, image_size, lr=3e-4):
        super().__init__()
        self.save_hyperparameters()
        self.model = vit_b_16(image_size=image_size, num_classes=100)
        self.loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, images):
        return self.model(images)

    def training_step(self, batch, batch_index):
        images, labels = batch
        loss = self.loss(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_index):
        images, labels = batch
        logits = self(images)
        self.log("val_loss", self.loss(logits, labels))
        self.log("val_accuracy", (logits.argmax(1) == labels).float().mean(), prog_bar=True)

    def on_train_batch_end(self, outputs, batch, batch_index):
        print(f"batch {batch_index} {torch.cuda.max_memory_allocated():,} B")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    L.seed_everything(0)
    images = torch.zeros(512, 3, args.image_size, args.image_size)
    data = TensorDataset(images, torch.arange(512) % 100)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            default_root_dir=folder,
            max_epochs=args.epochs,
            precision="bf16-mixed",
            gradient_clip_val=1.0,
            log_every_n_steps=1,
            logger=False,
        )
        trainer.fit(
            Classifier(args.image_size),
            DataLoader(data, batch_size=args.batch_size, shuffle=True),
            DataLoader(data, batch_size=args.batch_size),
        )


if __name__ == "__main__":
    main()
