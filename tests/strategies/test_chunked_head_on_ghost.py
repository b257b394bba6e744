"""On the ghost: the peak of a step with the head in chunks follows from the shapes, to the byte."""

import json

import pytest

pytestmark = [pytest.mark.process, pytest.mark.warm]

POSITIONS, FEATURES, CLASSES = 2048, 256, 16384
LOGITS, WEIGHT, HIDDEN = (
    4 * size for size in (POSITIONS * CLASSES, CLASSES * FEATURES, POSITIONS * FEATURES)
)
NUMBER = 512
"""What the allocator gives a tensor of one number."""

SCRIPT = f"""
    import json, torch
    from torch import nn
    from torch.nn.functional import cross_entropy
    from memfit import ChunkedHead

    def peak(loss, dtype=torch.float32):
        options = dict(device="cuda", dtype=dtype)
        trunk = nn.Linear({FEATURES}, {FEATURES}, **options)
        head = nn.Linear({FEATURES}, {CLASSES}, bias=False, **options)
        x = torch.randn({POSITIONS}, {FEATURES}, **options)
        targets = torch.randint({CLASSES}, ({POSITIONS},), device="cuda")
        parameters = [*trunk.parameters(), *head.parameters()]
        for _ in range(2):
            for each in parameters:
                each.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss(head, trunk(x), targets).backward()
            found = torch.cuda.max_memory_allocated() - before
        return found, torch.cuda.memory_allocated() - before - sum(each.grad.nbytes for each in parameters)

    def chunked(chunks, *options):
        return lambda head, *rest: ChunkedHead(head, chunks, *options)(*rest)

    plain = lambda head, hidden, targets: cross_entropy(head(hidden), targets)
    peak(plain)  # libraries allocate their workspaces once
    found = {{
        "plain": peak(plain),
        **{{chunks: peak(chunked(chunks)) for chunks in (1, 2, 8, 16)}},
        "bfloat16": peak(chunked(8), torch.bfloat16),
        "bfloat16, summed in it": peak(chunked(8, "bfloat16"), torch.bfloat16),
    }}
    open("found.json", "w").write(json.dumps(found))
"""


def test_peaks_follow_from_the_shapes(dry_run):
    done = dry_run(SCRIPT, options=("--to-end", "--gpu", "A100-80GB"))
    assert done.code == 0, done.err
    found = json.loads((done.folder / "found.json").read_text())
    assert {kept for _, kept in found.values()} == {0}, "only gradients are left"
    peaks = {name: peak for name, (peak, _) in found.items()}
    # At the peak, log_softmax is differentiated: its result, the gradient of that, and the logits' gradient.
    # Besides, a few numbers: the loss, its gradient, and in slices the divisor and the sum so far.
    assert peaks["plain"] == HIDDEN + 3 * LOGITS + 2 * NUMBER
    # The same for a slice; the gradient of the hidden states is being collected and, from the second slice
    # on, the sum of the weight's.
    assert peaks["1"] == 2 * HIDDEN + 3 * LOGITS + 3 * NUMBER
    for chunks in (2, 8, 16):
        assert peaks[f"{chunks}"] == 2 * HIDDEN + WEIGHT + 3 * LOGITS // chunks + 4 * NUMBER
    # Weights and hidden states take half. By default, the sum does not.
    assert peaks["bfloat16"] - peaks["bfloat16, summed in it"] == WEIGHT // 2
