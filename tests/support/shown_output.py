"""Documentation pages that show code and its output: what they show, and whether running it prints the same.

```python          a file, if its first line is its name in a comment; otherwise code that runs, block
# train.py         after block, in one namespace
```
```text            what the block of Python before it prints
```
```console
$ memfit ...       a command, and what it prints; ... stands for lines that are left out
```
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass

from support import warm_process

LEFT_OUT = "..."
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# (\S+\.py)\n")
NUMBER = r"(\d+(?:,\d{3})*(?:\.\d+)?)"
READ_BY_CUDA = {"CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"}
"""Variables that PyTorch reads when CUDA is initialised, which in a fork of a warm process is to come."""


@dataclass(frozen=True)
class Command:
    """A command as a page shows it, with its settings of the environment and the lines below it."""

    words: tuple[str, ...]
    environment: dict[str, str]
    shown: tuple[str, ...]


def files(page):
    """Return the text of each file that a page shows, by its name."""
    blocks = [text for kind, text in BLOCK.findall(page) if kind == "python"]
    return {name[1]: text for text in blocks if (name := FILE.match(text))}


def commands(page):
    """Return the commands of a page, in order."""
    found = []
    for kind, text in BLOCK.findall(page):
        if kind == "console":
            assert text.startswith("$ "), text
            found.extend(_command(part) for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:])
    return found


def _command(text):
    line, *shown = text.splitlines()
    words = shlex.split(line, comments=True)
    settings = [word for word in words if re.match(r"[A-Z_]+=", word)]
    environment = dict(setting.split("=", 1) for setting in settings)
    return Command(tuple(words[len(settings) :]), environment, tuple(shown))


def printed_by(command, folder):
    """Run a command of a page in a folder; return the lines that it prints."""
    program, *arguments = command.words
    is_warm = command.environment.keys() <= READ_BY_CUDA and arguments[0] not in {"train", "verify"}
    if program == "memfit" and is_warm:
        done = warm_process.memfit(*arguments, cwd=folder, **command.environment)
    elif program == "cat":
        return (folder / arguments[0]).read_text().splitlines()
    else:
        words = {"memfit": ["-m", "memfit"], "python": []}[program]
        done = subprocess.run(
            [sys.executable, *words, *arguments],
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | command.environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            # memfit train speaks on standard error, the script on standard output
            stderr=subprocess.STDOUT if arguments[0] == "train" else subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 0, f"{shlex.join(command.words)}\n{done.stdout}\n{done.stderr}"
    return [line.rstrip() for line in done.stdout.splitlines()]


def sessions(page):
    """Return a page's blocks of code, each with the lines that the page shows below it."""
    found, blocks = [], BLOCK.findall(page)
    for (kind, text), (next_kind, output) in zip(blocks, [*blocks, ("", "")][1:], strict=True):
        if kind == "python" and not FILE.match(text):
            found.append((text, output.splitlines() if next_kind == "text" else []))
    return found


def run_block(code, namespace):
    """Run a block of code; return the lines that it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "<page>", "exec"), namespace)  # noqa: S102 - the code is the page's own
    return [line.rstrip() for line in out.getvalue().splitlines()]


def not_printed(shown, printed):
    """Return the shown lines that were not printed in this order; `...` stands for any lines."""
    left = iter(printed)
    return [line for line in shown if line != LEFT_OUT and not any(line == found for found in left)]


def unfounded_numbers(page):
    """Return the numbers of a page's sentences that none of its blocks shows.

    Only numbers with a fraction, a separator or a unit of memory or a share count. Sentences that say
    "published" or lead to a source on the web are about other people's figures.
    """
    blocks = "\n".join(text for _, text in BLOCK.findall(page))
    shown = {number.replace(",", "") for number in re.findall(NUMBER, blocks)}
    prose = re.sub(r"`[^`]*`", "", BLOCK.sub("", page))
    prose = re.sub(r"(PyTorch|torch|Python|CUDA) \d+(\.\d+)*", "", prose)
    sentences = re.split(r"(?<=[.?!])\s+|\n(?=[|#-])", prose)
    own = [each for each in sentences if "published" not in each.lower() and "://" not in each]
    figures = re.findall(rf"(?<![\w.]){NUMBER}(?=( ?[KMGT]i?B\b| ?B\b| bytes| ?%| times)?)", "\n".join(own))
    counted = [number for number, unit in figures if unit or "," in number or "." in number]
    return [number for number in counted if number.replace(",", "") not in shown]
