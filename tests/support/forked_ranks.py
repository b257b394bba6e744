"""Run scripts as torchrun does, but in forks of one process: ``forked_ranks.py RANKS FOLDER SCRIPT...``.

One script runs after another, its ranks at once, on the CPU. What they print goes to ``FOLDER/SCRIPT.RANK``.
Under torchrun, each rank of each script imports PyTorch and Dynamo.
"""

import os
import runpy
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo  # the scripts' optimizers import it

from memfit.run.launchers import free_port


def main():
    """Run the scripts; stop at the first that fails."""
    ranks, folder, *scripts = sys.argv[1:]
    torch.set_num_threads(1)
    for script in scripts:
        job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "localhost"}
        job["MASTER_PORT"] = str(free_port())
        started = [_start(script, rank, job, Path(folder)) for rank in range(int(ranks))]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started]
        if any(codes):
            sys.exit(f"The ranks of {script} ended with exit codes {codes}.")


def _start(script, rank, job, folder):
    process = os.fork()
    if process:
        return process
    os.environ.update(job, RANK=str(rank), LOCAL_RANK=str(rank))
    output = os.open(folder / f"{Path(script).name}.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    sys.argv[:] = [script]
    sys.path[0] = str(Path(script).parent)
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        sys.stdout.flush()
        code = 0
    except BaseException:  # noqa: BLE001 - as where the interpreter ends
        traceback.print_exc()
    os._exit(code)  # on gloo, about one process in twenty aborts while the interpreter is finalised


if __name__ == "__main__":
    main()
