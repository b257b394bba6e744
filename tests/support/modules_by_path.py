"""Scripts that are in no package, such as benchmarks, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_of(script: Path) -> ModuleType:
    """Import a script by its path; its folder is not searched for what it imports."""
    spec = importlib.util.spec_from_file_location(f"script_{script.stem}", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
