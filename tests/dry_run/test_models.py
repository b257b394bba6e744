"""Short scripts with models whose sizes depend on values, and with libraries other than PyTorch."""

import importlib.util

import pytest

from support.scripts import figures

pytestmark = pytest.mark.warm

MASK_RCNN = """
    import torch
    from torchvision.models.detection import maskrcnn_resnet50_fpn
    model = maskrcnn_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=5, min_size=128, max_size=128,
        box_batch_size_per_image=64,
    ).cuda().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(2):
        boxes = torch.tensor([[10.0, 10.0, 90.0, 90.0]], device="cuda")
        masks = torch.ones(1, 128, 128, dtype=torch.uint8, device="cuda")
        target = {"boxes": boxes, "labels": torch.ones(1, dtype=torch.long, device="cuda"), "masks": masks}
        losses = model([torch.rand(3, 128, 128, device="cuda")] * 2, [target] * 2)
        sum(losses.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    print("allocated", torch.cuda.max_memory_allocated())
"""


@pytest.mark.slow
def test_mask_rcnn_trains_on_as_many_proposals_as_its_sampler_takes(dry_run):
    run = dry_run(MASK_RCNN, options=("--steps", "5"))
    assert run.code == 0, run.err
    assert f"allocated {run.answer['peak']['allocated']}" in run.out
    found = [note["text"] for note in run.answer["notes"] if "nonzero is assumed" in note["text"]]
    assert any("as many as possible, 64 elements" in text for text in found)  # of about a thousand per image
    assert any("as many as possible, 128 elements" in text for text in found)  # of both
    assert (
        run.answer["upper_bound"]["operator"] == "nonzero"
    )  # of the peak, in the backward, little depends on it


def test_a_padded_batch_in_nn_transformer_stays_padded(dry_run):
    script = """
        import torch
        layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2).cuda().eval()
        padding = torch.zeros(8, 32, dtype=torch.bool, device="cuda")
        padding[:, 20:] = True
        with torch.no_grad():
            output = model(torch.randn(8, 32, 64, device="cuda"), src_key_padding_mask=padding)
        print("shape", tuple(output.shape))
    """
    run = dry_run(script)
    assert "shape (8, 32, 64)" in run.out, run.err
    assert any("a padded batch is assumed to stay padded" in note["text"] for note in run.answer["notes"])


@pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="bitsandbytes is not installed")
def test_four_bit_weights_take_the_bytes_of_their_format(dry_run):
    """1024 x 1024 in NF4, double quantised, blocks of 64 and of 256; the allocator rounds to 512 bytes."""
    script = """
        import bitsandbytes as bnb
        import torch
        layer = bnb.nn.Linear4bit(1024, 1024, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16)
        layer.cuda()
        print("weight", torch.cuda.memory_allocated())
        trained = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
        optimizer = bnb.optim.AdamW8bit(trained.parameters())
        for _ in range(3):
            trained(layer(torch.randn(8, 1024, device="cuda"))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    run = dry_run(script, options=("--steps", "5"))
    assert run.code == 0, run.err
    elements, scales = 1 << 20, (1 << 20) // 64
    # 16 floats for the weights, 256 for their scales twice: those in use, and the default
    codes = 512 + 1024 + 1024
    weight = elements // 2 + scales + 512 * -(-scales // 256 * 4 // 512) + codes + 512  # ... and an offset
    assert f"weight {weight}" in run.out
    eight_bit = 2 * elements + 2 * 4 * elements // 256 + 2 * 1024  # moments, their scales, a code for each
    assert figures(run.answer)["optimizer state"] == pytest.approx(eight_bit, abs=2048)


def test_a_torchscript_module_is_labelled_and_trained(dry_run):
    script = """
    import torch, warnings
    warnings.simplefilter("ignore")  # PyTorch warns that it is deprecated
    traced = torch.jit.trace(torch.nn.Linear(64, 64).cuda(), torch.ones(8, 64, device="cuda"))
    model = torch.nn.Sequential(traced, torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
    traced(torch.randn(8, 64, device="cuda"))  # as the outermost module
    print("allocated", torch.cuda.max_memory_allocated())
    """
    run = dry_run(script, options=("--steps", "5"))
    assert run.code == 0, run.err
    assert f"allocated {run.answer['peak']['allocated']}" in run.out
    assert run.answer["steps"] == 2


LAZY = """
    import torch
    from torch import nn
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.LazyLinear(4)).cuda().to(torch.float64)
    x = torch.ones(2, 8, device="cuda", dtype=torch.float64)
    model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    print([tuple(each.shape) for each in model.parameters()])
    online, target = (nn.LazyLinear(4).cuda() for _ in range(2))
    target.load_state_dict(online.state_dict())
"""


def test_lazy_modules_move_to_the_gpu_before_they_know_their_sizes(dry_run):
    run = dry_run(LAZY, options=("--to-end",))
    assert run.code == 0, run.err
    assert run.out.splitlines()[0] == "[(16, 8), (16,), (16,), (16,), (4, 16), (4,)]"
