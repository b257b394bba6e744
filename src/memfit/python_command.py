"""Commands that run one of memfit's modules in a separate process."""

import subprocess
import sys
from collections.abc import Mapping

from memfit.errors import TargetError

_LAST_LINES = 5


def command_running_module(module: str) -> list[str]:
    """Return the command that runs a module's ``main`` with this interpreter and its options (``-O``)."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", code_running_module(module)]


def output_of_module(
    module: str, task: str, seconds: float, *arguments: str, environment: Mapping[str, str] | None = None
) -> str:
    """Run a module's ``main`` in a process of its own; return what it printed.

    Args:
        module: such as ``memfit.run.host_probe``.
        task: what could not be done if it fails: ``time kernels on the T4``.
        seconds: that it may take.
        arguments: of the process.
        environment: its variables; by default those of this process.

    Raises:
        TargetError: the process failed, or took longer; the message quotes the last lines of its error.
    """
    try:
        done = subprocess.run(
            [*command_running_module(module), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise TargetError(f"Cannot {task}:\nno answer within {seconds:g} s") from None
    if done.returncode:
        raise TargetError(f"Cannot {task}:\n" + "\n".join(done.stderr.splitlines()[-_LAST_LINES:]))
    return done.stdout


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
