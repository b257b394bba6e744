"""Scripts and readings that several tests share."""

TRAIN = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
    model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    def step():
        optimizer.zero_grad()
        loss = model(torch.randn(64, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
"""


def figures(answer):
    """Return the terms of a JSON answer: bytes by name."""
    return {term["name"]: term["bytes"] for term in answer["terms"]}
