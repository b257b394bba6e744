"""One linear layer, line by line: what each line of a training step adds to GPU memory.

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

model = torch.nn.Linear(1024, 1024, bias=False, device=device)
report("model")

inputs = torch.randn(1024, device=device)
report("inputs")

outputs = model(inputs)
report("outputs")

loss = outputs.sum()
report("loss")

loss.backward()
report("backward")

optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for step in ("step 1", "step 2"):
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    report(step)
    # sqrt(v) and sqrt(v) / c exist only inside the step: two more tensors of the weight's size.
    print(f"{step} peak    {torch.cuda.max_memory_allocated():>12,}")

loss = model(inputs).sum()
report("loss again")

loss.backward()
report("backward again")

print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
