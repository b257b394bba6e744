"""Let NCCL's process groups release what finished collectives held.

PyTorch's watchdog thread does so ten times a second: on a card within about a step, on the ghost after any
number of them, for a step there takes milliseconds. So a run's peak would depend on the machine's speed.

Source: ``waitForPendingWorks``, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, PyTorch 2.14.
"""

import sys
from typing import Any


def settle_collectives() -> None:
    """Wait until the watchdog of each process group has released all finished collectives."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return
    nccl = getattr(c10d, "ProcessGroupNCCL", None)
    if nccl is None:  # a PyTorch without it
        return
    for group in list(c10d._world.pg_map):
        for device in group._device_types:
            backend = group._get_backend(device)
            if isinstance(backend, nccl):
                backend._wait_for_pending_works()
