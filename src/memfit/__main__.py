"""``python -m memfit`` and the installed command ``memfit``."""

import atexit
import os
import sys

from memfit.termination_signals import exit_silently_on_ctrl_c


def main() -> None:
    """Run the command line, and exit without finalising the interpreter.

    Ctrl-C works while the commands are imported, too. A finalising interpreter would let it end the process
    by a signal, or ignore it.
    """
    exit_silently_on_ctrl_c()
    from memfit.cli.main import run_command

    code = run_command(sys.argv[1:])
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
