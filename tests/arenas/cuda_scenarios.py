"""Run scenarios on the ghost with the arena as PyTorch's allocator, each in a forked child.

Prints what each scenario printed, as JSON; ``test_cuda.py`` has the expected output.
"""

import json
import os
import sys
import traceback
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import cuda_memory_scenarios
import cuda_training_scenarios
from cuda_helpers import ghost

from memfit.devices import find_device
from memfit.ghost.ghost_device import GhostDevice


def main(names):
    printed = {}
    with TemporaryDirectory() as folder:
        for name in names:
            path = Path(folder) / name
            os.chdir(folder)
            child = os.fork()
            if not child:
                run(name, path)
            printed[name] = (
                path.read_text() if os.waitpid(child, 0)[1] == 0 else f"failed\n{path.read_text()}"
            )
    print(json.dumps(printed))


def scenario(name):
    return getattr(cuda_training_scenarios, name, None) or getattr(cuda_memory_scenarios, name)


def run(name, path):
    code = 1
    with path.open("w") as file, redirect_stdout(file):
        try:
            warnings.simplefilter("error")
            ghost.configure(GhostDevice.of(find_device("A100-80GB")), count=2)
            scenario(name)()
            code = 0
        except BaseException:  # noqa: BLE001 - the test shows it
            traceback.print_exc(file=file)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
