"""Prove a plan by real arithmetic: the gradients of one update, with the plan and without.

run_updates          runs the script: as written, as written again, under the plan
  first_update       the script's process: writes the gradients of the first update, and ends the script
  cpu_stand_in       runs code for CUDA on the CPU, where there is no GPU
compare_updates    the verdict
"""
