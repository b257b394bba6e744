"""memfit: know what GPU memory a training script will use before there is a GPU, and make it fit.

>>> import memfit
>>> result = memfit.dry_run("train.py", gpu="RTX-3060")  # doctest: +SKIP
>>> result.verdict, result.peak_allocated  # doctest: +SKIP
('fits', 6448338944)
>>> memfit.estimate(model, inputs, optimizer=optimizer).fits("RTX-3060")  # doctest: +SKIP
True
"""

_INTEGRATIONS = "memfit.integrations"
"""Whose modules need the extra of their name."""
_MODULE_OF_NAME: dict[str, str] = {}
"""The names that memfit exports: those of ``__init__.pyi``, which type checkers read. Filled on first use."""


def _modules() -> dict[str, str]:
    """Return the module that defines each exported name."""
    import ast
    from pathlib import Path

    if not _MODULE_OF_NAME:
        for line in ast.parse(Path(__file__).with_suffix(".pyi").read_text("ascii")).body:
            if isinstance(line, ast.ImportFrom):
                _MODULE_OF_NAME.update(dict.fromkeys((name.name for name in line.names), str(line.module)))
    return _MODULE_OF_NAME


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})


def __getattr__(name: str) -> object:
    # Imported on first use, so that ``import memfit`` and ``memfit --help`` stay fast.
    from importlib import import_module

    modules = _MODULE_OF_NAME or _modules()
    if name == "__all__":
        return sorted(name for name, module in modules.items() if module != _INTEGRATIONS)
    if name not in modules:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    if modules[name] == _INTEGRATIONS:
        return import_module(f"{_INTEGRATIONS}.{name}")
    return getattr(import_module(modules[name]), name)
