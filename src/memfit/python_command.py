"""The code for ``python -c`` that runs one of memfit's modules in a separate process."""


def python_code(module: str) -> str:
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
