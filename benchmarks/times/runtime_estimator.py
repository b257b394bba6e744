"""Run a script on the ghost, and print what the roofline of PyTorch's RuntimeEstimator says of its second step.

    memfit dry-run --gpu H100 -- benchmarks/times/runtime_estimator.py "NVIDIA H100" SCRIPT [ARGUMENT ...]

The first argument names the card in PyTorch's own table of data sheets. The estimator asks for fake tensors, so
that a script needs no memory of a GPU; on the ghost it needs none either.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

PREFIX = "RuntimeEstimator, ms until the update and until its end:"
_SECOND_ENDS = 4
"""The mark at the end of the second step: after those of the start and of the first update."""


class EstimatedSteps(TorchDispatchMode):
    """Adds up the milliseconds of operations."""

    def __init__(self) -> None:
        super().__init__()
        self._total = 0.0
        self.marks = [0.0]
        """Milliseconds where each update begins, and where it ends."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        result, milliseconds = RuntimeEstimator._roofline_estimate(func, args, kwargs or {})
        self._total += milliseconds
        return result

    def mark(self, *_: Any) -> None:
        """Note that an update begins or ends."""
        self.marks.append(self._total)


def main() -> None:
    """Run the script that the command line names."""
    RuntimeEstimator.gpu_type, script, *arguments = sys.argv[1:]
    estimated = EstimatedSteps()
    register_optimizer_step_pre_hook(estimated.mark)
    register_optimizer_step_post_hook(estimated.mark)
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    try:
        with estimated:
            runpy.run_path(script, run_name="__main__")
    finally:
        if len(estimated.marks) > _SECOND_ENDS:
            first, update, second = estimated.marks[_SECOND_ENDS - 2 :][:3]
            print(PREFIX, update - first, second - first, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
