"""On the ghost: slices need no more than a loop's micro-batches and the outputs of the whole batch."""

import json

import pytest

pytestmark = pytest.mark.warm

SCALARS = 4 * 512
"""Blocks of a model that returns its loss: the sums of the slices' losses and of what divides them."""

PEAKS = """
    import gc, json, torch
    from torch import nn
    from torch.nn import functional
    from memfit import BatchSlices

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        def forward(self, x):
            return x + self.down(functional.gelu(self.up(self.norm(x))))

    class Language(nn.Module):
        def __init__(self, loss):
            super().__init__()
            self.embedding, self.head = nn.Embedding(2048, 128), nn.Linear(128, 2048)
            self.blocks, self.loss = nn.Sequential(*(Block(128) for _ in range(6))), loss
        def forward(self, x, targets=None):
            logits = self.head(self.blocks(self.embedding(x)))
            if not self.loss:
                return logits
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(64, 256, 2), nn.Linear(256, 64)
        def forward(self, x):
            return self.head(self.lstm(x)[0])

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            def block(i, o):
                return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.SiLU())
            self.down, self.middle, self.up = block(3, 32), block(32, 32), block(64, 32)
            self.out = nn.Conv2d(32, 3, 1)
        def forward(self, x):
            skip = self.down(x)
            deep = functional.interpolate(self.middle(functional.avg_pool2d(skip, 2)), scale_factor=2)
            return self.out(self.up(torch.cat([skip, deep], 1)))

    def images(side=32):
        return torch.randn(16, 3, side, side, device="cuda")

    def tokens():
        return torch.randint(2048, (16, 64), device="cuda")

    squared = lambda model, x: model(x).square().mean()
    encoder = lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 4, enable_nested_tensor=False
    )
    blocks = lambda count: [Block(256) for _ in range(count)]
    def convolution(channels):
        return nn.Sequential(nn.Conv2d(channels, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU())
    def convolutions():
        body = [convolution(3), *(convolution(32) for _ in range(5))]
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(32768, 10))
    def features(*shape):
        return lambda: torch.randn(*shape, device="cuda")
    def entropy(model, x):
        return functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    NETWORKS = {
        "perceptron": (lambda: nn.Sequential(*blocks(8)), features(16, 64, 256), squared, 0),
        "convolutions": (convolutions, images, squared, 0),
        "encoder": (encoder, features(16, 64, 128), squared, 0),
        "recurrent, sequences first": (Recurrent, features(64, 16, 64), squared, 1),
        "unet": (UNet, lambda: images(64), squared, 0),
        "frozen below": (
            lambda: nn.Sequential(Block(256).requires_grad_(False), *blocks(6)),
            features(16, 64, 256), squared, 0
        ),
        "language model": (lambda: Language(False), tokens, entropy, 0),
        "language model, returns its loss": (lambda: Language(True), tokens, lambda model, x: model(x, x), 0),
    }

    def peak(build, batch, loss, dim, parts=1, slices=None):
        model = build().cuda()
        if slices:
            slices.apply(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            if step == 1:
                gc.collect()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            x = batch()
            for part in x.chunk(parts, dim):
                (loss(model, part) / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated() - before

    def of_loss(build, batch, loss):
        x = batch()
        with torch.no_grad():
            output = build().cuda()(x)
        output.requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss(lambda x: output, x).backward()
        return torch.cuda.max_memory_allocated() - before

    found = {}
    for name, (build, batch, loss, dim) in NETWORKS.items():
        case = (build, batch, loss, dim)
        whole, loop = peak(*case), peak(*case, parts=4)
        found[name] = [whole, loop, peak(*case, slices=BatchSlices(4, dim=dim))]
        found[name].append(0 if "its loss" in name else of_loss(build, batch, loss))
    open("found.json", "w").write(json.dumps(found))
"""


def test_slices_need_no_more_than_micro_batches_and_the_loss_of_the_whole_batch(dry_run):
    """What a loss keeps and computes of the whole outputs, its own gradient included, is measured alone."""
    done = dry_run(PEAKS, options=("--to-end",))
    assert done.code == 0, done.err
    found = json.loads((done.folder / "found.json").read_text())
    assert len(found) == 8
    for name, (whole, loop, sliced, loss) in found.items():
        scalars = SCALARS * ("returns its loss" in name)
        assert sliced <= loop + loss + scalars, (name, whole, loop, sliced, loss)
