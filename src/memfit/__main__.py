"""``python -m memfit`` is the command ``memfit``."""

from memfit.cli import main

main()
