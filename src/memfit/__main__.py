"""``python -m memfit`` is the command ``memfit``."""

from memfit.cli.main import main

main()
