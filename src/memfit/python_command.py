"""Commands that run one of memfit's modules in a separate process."""

import subprocess
import sys


def command_running_module(module: str) -> list[str]:
    """Return the command that runs a module's ``main`` with this interpreter and its options (``-O``)."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", code_running_module(module)]


def code_running_module(module: str) -> str:
    """Return the code for ``python -c`` that runs a module's ``main``.

    Not ``python -m``, which searches the working folder first, where a user's ``platform.py`` would replace
    the standard library's.
    """
    return f"""
import sys
sys.flags.safe_path or sys.path.pop(0)
try:
    from {module} import main
    main()
except KeyboardInterrupt:
    sys.exit(130)
"""
