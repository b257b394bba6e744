"""Find what to change about a script so that a training step fits a budget.

records.StepOperations      one step, operation by operation
  │ memory_model.py         what each part of the backward needs, as a function of what is kept
  │ region_options.py       ways to checkpoint a module: which results it keeps, and the time it costs
  │ tensor_options.py       ways to recompute the tensors of a model one by one
  ├ choose.py               the cheapest ways under a budget (mixed-integer programming)
  │   └ uniform_choices.py  the same without a solver: modules of one kind alike
  └ sample_independence.py  whether micro-batches give the same sums

changes.py, batches.py      what can be changed about a script, what to write for it, and what it costs
  └ plan_runs.py            runs changes on the ghost: what the script then needs
      ├ plan_search.py      what the searches for the fastest plan have in common
      │   ├ search.py       choices, with whole batches and with divided ones
      │   │   └ bracket.py  choices between the fastest that fits and the smallest that does not
      │   └ compiled_search.py
      └ fewest_changes.py   the search for advice: the fewest changes that are enough, in few runs
max_batch.py                the largest batch that fits
plan_file.py                what ``memfit plan -o`` wrote
"""
