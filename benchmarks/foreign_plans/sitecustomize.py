"""Write down each floating-point number that a script reads from a tensor, such as its losses.

Python imports this module at its start if the folder is in PYTHONPATH. A line of the file that FOREIGN_READS
names: the number, and the processor time of the process. The scripts print four digits; this has them all.
With FOREIGN_GPU, torch.cuda.is_available() returns True to the script, and the CPU computes.
"""

import os
import sys
import time
from pathlib import Path

from memfit.patching.after_import import call_after_import


def _follow_reads() -> None:
    import torch

    torch.manual_seed(0)  # some scripts seed nothing
    own = tuple(path for name in ("memfit", "torch") for path in sys.modules[name].__path__)
    item, parent = torch.Tensor.item, os.getpid()

    def read(tensor: torch.Tensor) -> object:
        value = item(tensor)
        by_script = not sys._getframe(1).f_code.co_filename.startswith(own)
        if by_script and isinstance(value, float) and os.getpid() == parent:
            with Path(os.environ["FOREIGN_READS"]).open("a", encoding="utf-8") as file:
                file.write(f"{value!r} {time.process_time()!r}\n")
        return value

    torch.Tensor.item = torch.Tensor.__float__ = read  # type: ignore[method-assign,assignment]


def _is_called_by_script() -> bool:
    """Return whether the caller is in the working folder, rather than in a library: that there is one GPU."""
    return Path.cwd() in Path(sys._getframe(1).f_code.co_filename).absolute().parents


def _stand_in_for_gpu() -> None:
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from memfit.patching.installed_hooks import InstalledHooks
    from memfit.verification.make_runs_comparable import install_cpu_stand_in

    install_cpu_stand_in(InstalledHooks())
    torch.cuda.is_available = torch.cuda.device_count = _is_called_by_script  # type: ignore[assignment]
    begin, wrap = distributed.init_process_group, DistributedDataParallel.__init__
    distributed.init_process_group = lambda *_: begin("gloo")

    def on_cpu(self: object, module: object, **_: object) -> None:
        wrap(self, module)  # type: ignore[arg-type]

    DistributedDataParallel.__init__ = on_cpu  # type: ignore[assignment,method-assign]


if "FOREIGN_GPU" in os.environ:
    call_after_import("torch", _stand_in_for_gpu)
if "FOREIGN_READS" in os.environ:
    call_after_import("torch", _follow_reads)
