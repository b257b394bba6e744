"""Scripts that feed their models in many ways; their argument is the number of samples in a batch."""

import textwrap

BEGIN = """
    import sys
    import numpy as np
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset

    size = int(sys.argv[-1]) if len(sys.argv) > 1 else 8
    token = nn.Embedding(100, 64)

    def train(model, batches, criterion=lambda y, target: (y - target).square().mean()):
        model.cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in batches:
            optimizer.zero_grad()
            result = model(x.cuda()).flatten(0, -2)
            criterion(result, y.cuda().flatten()[:, None].expand_as(result)).backward()
            optimizer.step()
"""
LOADER = """
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
    order = np.random.permutation(64)
    train(nn.Sequential(nn.Linear(16, 64), nn.GELU()), DataLoader(data, size, sampler=order), nn.MSELoss())
"""
AUGMENTED = """
    class Noisy(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + torch.randn(16, generator=torch.Generator().manual_seed(size)), y
    data = Noisy(torch.randn(64, 16), torch.randn(64, 1))
    train(nn.Sequential(nn.Linear(16, 64), nn.GELU()), DataLoader(data, batch_size=size))
"""
DRAWN_ANEW = """
    x, y = torch.randn(64, 16), torch.randn(64, 1)
    chosen = (np.random.permutation(64)[:size] for _ in range(12))
    train(nn.Sequential(nn.Linear(16, 64), nn.GELU()), ((x[some], y[some]) for some in chosen))
"""
ON_GPU = """
    x, y = torch.randn(256, 16).cuda(), torch.randn(256, 1).cuda()
    train(nn.Sequential(nn.Linear(16, 64), nn.GELU()), zip(x.split(size), y.split(size)))
"""
MADE_ON_GPU = """
    draw = lambda *shape: torch.randn(*shape, device="cuda")
    train(nn.Sequential(nn.Linear(16, 64), nn.GELU()), ((draw(size, 16), draw(size, 1)) for _ in range(12)))
"""
CORPUS = """
    corpus = torch.arange(2048).remainder(100)
    columns = corpus.reshape(size, -1).t().contiguous()
    {to_gpu}
    parts = ((columns[i:i + 4], columns[i + 1:i + 5]) for i in range(0, 32, 4))
    train(nn.Sequential(token, nn.Linear(64, 64)), ((x, y.float()) for x, y in parts))
"""
SEQUENCE_FIRST = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = token
            self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first={batch_first})
        def forward(self, x):
            return self.layer(self.token(x))
    data = torch.randint(100, (12, 8, 5))
    batches = (part for whole in data for part in whole.split(size))
    batches = (x.t().contiguous() if {transposed} else x for x in batches)
    train(Model(), ((x, x.float()) for x in batches))
"""
RECURRENT = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.rnn = token, nn.LSTM(64, 64, batch_first={batch_first})
        def forward(self, x):
            return self.rnn(self.token(x))[0]
    data = torch.randint(100, (12, 8, 5))
    train(Model(), ((x, x.float()) for whole in data for x in whole.split(size)))
"""
CARRIED = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.rnn = token, nn.LSTM(64, 64, batch_first=True)
        def forward(self, x, state=None):
            return self.rnn(self.token(x), state)
    model, state = Model().cuda(), None
    optimizer = torch.optim.AdamW(model.parameters())
    for x in torch.randint(100, (12, 8, 5)).split(size, 1):
        for part in x:
            result, state = model(part.cuda(), state)
            state = tuple(each.detach() for each in state)
            result.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
REMEMBERED = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)
            {begin}
        def forward(self, x):
            memory = self.memory
            y = self.linear(x if memory is None else x + memory)
            self.memory = y.detach()
            return y
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
    train(Model(), DataLoader(data, batch_size=size))
"""
CENTERED = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.mean = nn.Linear(16, 64), torch.zeros(64, device="cuda")
        def forward(self, x):
            y = self.linear(x)
            result = y - self.mean
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            return result
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
    train(Model(), DataLoader(data, batch_size=size))
"""
BASELINE = """
    model, mean = nn.Linear(16, 64).cuda(), torch.zeros((), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for x in torch.randn(64, 16).split(size):
        losses = model(x.cuda()).square()
        loss = (losses - mean).square().mean()
        mean = 0.9 * mean + 0.1 * losses.detach().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
LOADED_CORPUS = """
    class Columns(torch.utils.data.Dataset):
        def __init__(self):
            self.columns = torch.arange(2048).remainder(100).reshape(size, -1)
        def __len__(self):
            return 12
        def __getitem__(self, index):
            some = self.columns[:, 4 * index : 4 * index + 5]
            return some[:, :-1].contiguous(), some[:, 1:].float()
    train(nn.Sequential(token, nn.Linear(64, 64)), DataLoader(Columns(), batch_size=None))
"""
PADDED = """
    def collate(samples):
        return nn.utils.rnn.pad_sequence(samples, batch_first=True), torch.zeros(())
    data = [torch.randint(1, 100, (length,)) for length in range(3, 99)]
    train(nn.Sequential(token, nn.Linear(64, 64)), DataLoader(data, batch_size=size, collate_fn=collate))
"""
MIXED = """
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
    batches = ((x + x[torch.randperm(len(x))], y) for x, y in DataLoader(data, batch_size=size))
    train(nn.Sequential(nn.Linear(16, 64), nn.GELU()), batches)
"""
MIXED_ON_GPU = """
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
    loaded = ((x.cuda(), y.cuda()) for x, y in DataLoader(data, batch_size=size))
    batches = ((x + x[torch.randperm(len(x), device="cuda")], y) for x, y in loaded)
    train(nn.Sequential(nn.Linear(16, 64), nn.GELU()), batches)
"""


def write(path, script):
    """Write a script to a file, after what they have in common."""
    path.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(script))
