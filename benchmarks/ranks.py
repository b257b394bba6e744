"""Print what memfit claims about many GPUs, in tables, and check each figure.

    python benchmarks/ranks.py [--only SECTIONS]

A section is a module of benchmarks/rank_tables/; its docstring states the claim. Exits with 1 if a figure is
not what its section requires.
"""

import importlib
import sys
from types import ModuleType

from measuring import command_line, table_head, table_line

SECTIONS = ("fsdp2", "witness", "llama", "pipeline", "published", "killed", "nodes", "engine")
"""Modules of benchmarks/rank_tables/, in the order in which their tables are printed."""


def section(name: str) -> ModuleType:
    """Import a section: a docstring, ``COLUMNS`` (names) and ``rows()`` (``rank_tables.row.Row``)."""
    return importlib.import_module(f"rank_tables.{name}")


def report(name: str) -> list[str]:
    """Print the table of a section; return what failed."""
    module = section(name)
    print(f"## {name}\n\n{(module.__doc__ or '').strip()}\n")
    print(table_head((*module.COLUMNS, "as required"), f"l{'r' * (len(module.COLUMNS) - 1)}l"), flush=True)
    failed = []
    for row in module.rows():
        print(table_line((*row.cells, row.failure or "yes")), flush=True)
        if row.failure:
            failed.append(f"{name}, {row.cells[0]}: {row.failure}")
    print()
    return failed


def main() -> int:
    """Print the tables; return 1 if a figure is not as required."""
    parser = command_line(__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="SECTIONS", help="separated by commas")
    chosen = parser.parse_args().only.split(",")
    if unknown := sorted(set(chosen) - set(SECTIONS)):
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    failed = [failure for name in SECTIONS if name in chosen for failure in report(name)]
    print("\n".join(failed) or "Every figure is as required.")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
