"""Two linear layers: the activation between them lives from the forward to the backward.

Prints bytes allocated after every line, and how many the line added.
"""

import torch

device = "cuda"
allocated = 0


def report(line):
    global allocated
    before, allocated = allocated, torch.cuda.memory_allocated()
    print(f"{line:<14} {allocated:>12,} {allocated - before:>+12,}")


torch.manual_seed(0)

first = torch.nn.Linear(1024, 1024, bias=False, device=device)
report("first")

second = torch.nn.Linear(1024, 1, bias=False, device=device)
report("second")

inputs = torch.randn(1024, 1024, device=device)
report("inputs")

loss = second(first(inputs)).sum()
report("loss")

loss.backward()
report("backward")

loss = second(first(inputs)).sum()
report("loss again")

loss.backward()
report("backward again")

print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
