"""What a script does with a value that it reads: found in the code around the read."""

import runpy

import pytest

from memfit.recording import use_of_read
from memfit.recording.use_of_read import ReadUse

CASES = {
    ReadUse.REPORTED: [
        "print(read())",
        "print(f'{read():.3f}')",
        "losses = []\nfor i in range(3):\n    losses.append(read())\nprint(sum(losses) / len(losses))",
        "total = 0\nfor i in range(3):\n    total += read()\nprint('mean', total / 3)",
        "if True:\n    print(read())",
        "for i in range(3):\n    if i == 1:\n        print(read())\n        break",
        "import logging\nlogging.info('%s', read())\nif logging.root.disabled:\n    raise SystemExit",
        "bar = [1, 2]\nbar.append(read())\nfor i in bar:\n    pass",  # a progress bar
        "import math\nfor i in range(3):\n    if not math.isfinite(read()):\n        break",
        "assert read() > 0",
        "def epoch():\n    total = read()\n    return total / 2\nprint(epoch())",
    ],
    ReadUse.STEERS: [
        "for i in range(3):\n    if read() < 2:\n        continue",
        "for i in range(3):\n    n = int(read())\n    if n < 2: continue",
        "while read() > 2: pass",
        "error = 1\nwhile error > 0.5:\n    error = read() / 4",
        (
            "best, late = 9, 0\nfor i in range(9):\n    v = read()\n    if v < best: best = v\n    else:\n"
            "        late += 1\n    if late > 2: break"
        ),
        (
            "class Stop:\n    on = False\n    def __call__(self, v): self.on = v > 0\n"
            "stop = Stop()\nfor i in range(3):\n    stop(read())\n    if stop.on: break"
        ),
        (
            "def epoch():\n    total = 0\n    total += read()\n    return total / 2\n"
            "for i in range(3):\n    loss = epoch()\n    if loss < 2: break"
        ),
        "def forward():\n    if read() > 0:\n        return 1\n    return 2\nforward()",
        "for i in range(3):\n    if (read() > 0) and i: break",
        "values = [read() for i in range(3)]\nfor v in values:\n    if max(values) > 2: break",
    ],
    ReadUse.UNKNOWN: [
        "class Model:\n    def keep(self): self.last = read()\nModel().keep()",
        "class Model:\n    def keep(self): self.log(read())\n    def log(self, v): pass\nModel().keep()",
        "best = 9\nif read() < best:\n    print('train, or save')",
        "def values():\n    yield read()\nprint(list(values()))",
        "import functools\nfunctools.reduce(lambda a, b: a + read(), [1, 2])",
    ],
}


@pytest.fixture
def uses(tmp_path, monkeypatch):
    """Return a function that runs code, and what use of ``read()`` is found at each call."""
    file = tmp_path / "script.py"
    hidden = use_of_read.is_memfit_file
    monkeypatch.setattr(use_of_read, "is_memfit_file", lambda name: name == __file__ or hidden(name))

    def run(code, *, keep=True):
        file.write_text(code)
        found = []

        def read():
            if not keep:
                file.unlink()
            found.append(use_of_read.use_of_read())
            return 1.0

        runpy.run_path(str(file), {"read": read})
        return found

    return run


@pytest.mark.parametrize(("use", "code"), [(use, code) for use, codes in CASES.items() for code in codes])
def test_the_use_of_a_read(use, code, uses):
    assert {*uses(code)} == {use}


def test_a_read_without_source_is_unknown(uses):
    assert uses("print(read())", keep=False) == [ReadUse.UNKNOWN]
