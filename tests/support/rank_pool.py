"""A pool of gloo ranks on the CPU: started once, then asked to run one case after another.

Starting PyTorch takes seconds. A case is a function ``case(rank, ranks, *arguments)`` of a module.
"""

import importlib
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing import get_context

SECONDS = 60  # after which a case counts as hanging


class RankPool:
    """Some ranks of one process group.

    Args:
        ranks: how many.
    """

    def __init__(self, ranks):
        self.ranks = ranks
        self._processes = []

    def run(self, case, *arguments, module="support.rank_cases", ends=()):
        """Run a case on all ranks; return what each returned, rank by rank; None for those that end.

        Args:
            case: the name of a function.
            arguments: of the function, after the rank and the number of ranks.
            module: that has the function.
            ends: the ranks whose processes end in the case; afterwards all are started anew.

        Raises:
            AssertionError: a rank raised an exception, ended or hangs; the ranks are then started anew.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((module, case, arguments))
        results = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(SECONDS):
                self.close()
                raise AssertionError(f"rank {rank} hangs in {case}{arguments}")
            try:
                results.append(connection.recv())
            except EOFError:
                if rank in ends:
                    results.append((True, None))
                    continue
                self.close()
                raise AssertionError(f"rank {rank} ended in {case}{arguments}") from None
        if failed := [text for fine, text in results if not fine]:
            self.close()
            raise AssertionError("\n".join(failed))
        if ends:
            self.close()
        return [result for _, result in results]

    def close(self):
        """End the ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes = []

    def _start(self):
        context = get_context("spawn")
        store = tempfile.mkdtemp() + "/store"
        pairs = [context.Pipe() for _ in range(self.ranks)]
        self._connections = [ours for ours, _ in pairs]
        os.environ["OMP_NUM_THREADS"] = "1"
        self._processes = [
            context.Process(target=_serve, args=(rank, self.ranks, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()


def _serve(rank, ranks, store, connection):
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=SECONDS),
    )
    while True:
        try:
            module, case, arguments = connection.recv()
        except EOFError:
            sys.stdout.flush()
            os._exit(0)
        try:
            result = True, getattr(importlib.import_module(module), case)(rank, ranks, *arguments)
        except Exception:  # noqa: BLE001 - the parent shows it
            result = False, f"rank {rank}:\n{traceback.format_exc()}"
        connection.send(result)
