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
    assert {found for found, _ in uses(code)} == {use}


def test_a_read_without_source_is_unknown(uses):
    assert uses("print(read())", keep=False) == [(ReadUse.UNKNOWN, ())]


MODEL = "class Flag:\n    def __bool__(self): return read() < 0\nmodel, x, loss = (lambda u: u), [1], 1\n"
BRANCHES = {
    "if read() < 0: loss = loss + model(x)": ["loss = loss + model(x)"],
    "if Flag(): loss += model(x)": ["loss += model(x)"],
    "if read() < 0:\n    y = 1\nelse:\n    y = model(x)\n    z = 2": ["y = model(x)\n    z = 2"],
    "if read() > 2: y = model(x)\nelif loss: y = min(model(x))": [
        "y = model(x)",
        "if loss: y = min(model(x))",
    ],
    "y = model(x) if read() < 0 else model(loss)": ["model(x)", "model(loss)"],
    "n = int(read())\nif n > 3: y = [model][0](x)": [],
    "n = int(read())\nmodels = [model]\nif n > 3: y = models[0](x)": ["y = models[0](x)"],
    "if read() > 3: loss.backward()": ["loss.backward()"],
    "def step(net):\n    return net(x)\nif read() > 3: step(model)": ["step(model)"],
    "class T:\n    def run(self):\n        if read() > 3: self.step()\n    def step(self):\n"
    "        loss.backward()\nT().run()": ["self.step()"],
    "def again(n):\n    if read() > 3: again(n)\nagain(1)": [],
    "if read() > 3: print(model(x))": [],  # what is only printed needs no memory later
    "if read() > 3: loss = min(loss, abs(2)); x.sort()": [],
    "import copy\nif read() > 3: best = copy.copy(model)": [],
    "import math\nif math.isfinite(read()) is False: loss = model(x)": [],
    "if x: loss = read() + model(2)": [],
}


@pytest.mark.parametrize("code", BRANCHES)
def test_the_branches_that_a_read_decides_about_run_a_model(code, uses, tmp_path):
    lines = (MODEL + code).splitlines()
    _, branches = uses(MODEL + code)[-1]
    texts = []
    for file, (first, start), (last, end) in branches:
        assert file == str(tmp_path / "script.py")
        part = [line[:end] if number == last else line for number, line in enumerate(lines, 1)]
        texts.append("\n".join(part[first - 1 : last])[start:].removeprefix("el"))
    assert texts == BRANCHES[code]


def test_a_branch_runs_if_its_own_part_of_a_line_does(tmp_path):
    (tmp_path / "script.py").write_text("y = seen(1) if flag else seen(2)\nif flag: y = seen(3)\ny = seen(4)")
    file = str(tmp_path / "script.py")
    spans = [((1, 4), (1, 11)), ((1, 25), (1, 32)), ((2, 9), (2, 20))]
    branches = [use_of_read.Branch(file, *span) for span in spans]
    for flag, running in ((True, [0, 2]), (False, [1])):
        found = []
        look = {"seen": lambda _: found.extend(use_of_read.running_branches(branches)), "flag": flag}  # noqa: B023
        runpy.run_path(file, look)
        assert found == [branches[index] for index in running]
