"""The code of ``python -c`` that runs one of memfit's modules in a process of its own."""


def python_code(module: str) -> str:
    """Return what ``python -c`` needs to run a module's ``main`` in a process of its own.

    Not ``python -m``: that searches the working folder first, where a ``platform.py`` of the user's
    would stand in for the standard library's.
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
