"""Find what to change about a script so that a training step fits a budget.

records.StepOperations                one step, operation by operation
  │ step_memory_model.py              what each part of the backward needs, as a function of what is kept
  │ module_checkpoint_options.py      ways to checkpoint a module: the results it keeps, and the time it costs
  │ tensor_recompute_options.py       ways to recompute the tensors of a model one by one
  ├ choose_checkpointing.py           the cheapest ways under a budget (mixed-integer programming)
  │   └ uniform_checkpointing.py      the same without a solver: modules of one kind alike
  └ sample_independence.py            whether micro-batches give the same sums

strategy_and_allocator_changes.py     what can be changed about a script, what to write for it, and its cost
batch_size_changes.py                 the same for its batches
  └ run_changes_on_ghost.py           runs changes on the ghost: what the script then needs
      ├ plan_search_base.py           what the searches for the fastest plan have in common
      │   ├ find_plan.py              choices, with whole batches and with divided ones
      │   │   └ bracket_checkpoint_choices.py  between the fastest that fits and the smallest that does not
      │   └ find_compiled_plan.py
      └ fewest_changes.py             the search for advice: the fewest changes that are enough, in few runs
max_batch.py                          the largest batch that fits
plan_file.py                          what ``memfit plan -o`` wrote
"""
