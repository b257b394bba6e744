"""What memfit shows: text on the terminal, the public JSON, and the HTML page.

Importing rich draws from Python's generator, which belongs to the script. This package imports rich before
any of its modules, and restores the generator's state.
"""

import random

_state = random.getstate()
import rich.style  # noqa: E402, F401 - it draws a number

random.setstate(_state)
