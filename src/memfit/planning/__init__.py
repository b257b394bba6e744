"""Find what to change about a script, so that a training step fits a budget at the least time.

records.StepOperations      one step, operation by operation
  │ memory_model.py         what each part of the backward needs, as a function of what is kept
  │ region_options.py       ways to checkpoint a module: which results it keeps, and the time it costs
  │ seconds.py              seconds of an operation on a card
  ├ choose.py               the cheapest ways under a budget (mixed-integer programming)
  └ sample_independence.py  whether micro-batches give the same sums

search.py                   runs choices on the ghost, with whole batches and with divided ones
  ├ divided_batches.py      what sets a script's batch size, and smaller ones
  └ bracket.py              choices between the fastest that fits and the smallest that does not
"""
