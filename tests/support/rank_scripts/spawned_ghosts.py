"""Run a script whose ranks exist, each on a ghost: python spawned_ghosts.py N SCRIPT [ARGS...].

The script starts its ranks itself. As under torchrun, they meet and exchange short buffers; unlike in a dry
run, none of them stands for the others.
"""

import sys

from memfit.errors import TargetError
from memfit.run.options import RunOptions
from memfit.run.parent import run_script
from memfit.run.job_rank import Rank
from memfit.run.resolve_ghost_settings import resolve_ghost_settings

if __name__ == "__main__":
    options = RunOptions(steps=None, gpu="H100", rank=Rank(nproc=int(sys.argv[1])), real_ranks=True)
    try:
        run_script(tuple(sys.argv[2:]), options, resolve_ghost_settings(options), None, lambda _: None)
    except TargetError as error:
        if "did not use the GPU itself, but a process that it started did" not in str(error):
            raise
