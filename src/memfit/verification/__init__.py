"""Prove a plan by real arithmetic: the gradients of one update, with the plan and without.

runs_under_plan            runs the script: as written, twice; under the plan; and for its peak on a GPU
  first_update_process     the script's process: writes the gradients of the first update, and ends the script
  make_runs_comparable     no dropout, no clipping, and the CPU where there is no GPU
compare_updates            the verdict
"""
