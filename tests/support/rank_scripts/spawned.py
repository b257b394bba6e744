"""Run a script as N ranks that mp.spawn starts, and print each rank's peaks: spawned.py N PORT SCRIPT [ARGS...]."""

import contextlib
import io
import os
import runpy
import sys

import torch
import torch.multiprocessing as mp


def run(rank: int, ranks: int, port: str, command: list[str]) -> None:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sys.argv = command
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(command[0], run_name="__main__")
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"rank {rank}: {peaks[0]} {peaks[1]}\n", end="", flush=True)


if __name__ == "__main__":
    mp.spawn(run, args=(int(sys.argv[1]), sys.argv[2], sys.argv[3:]), nprocs=int(sys.argv[1]))
