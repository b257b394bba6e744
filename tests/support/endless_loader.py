"""A loader over a sampler that never ends; its source is also part of scripts."""

from torch.utils.data import DataLoader


class KeepsWorkers(DataLoader):
    """As in detectors and timm: one iterator for all passes, over a sampler that never ends."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        object.__setattr__(self, "batch_sampler", Endless(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class Endless:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from self.sampler
