"""memfit's output begins on a line of its own, whatever the script left on the terminal."""

import fcntl
import os
import struct
import termios

import pytest

from memfit.report.terminal.progress_line import move_to_line_start

COLUMNS = 20


def screen(text):
    """Return the lines that a terminal of 20 columns shows: it wraps before the first character too many."""
    lines, column = [[]], 0
    position = 0
    while position < len(text):
        if text.startswith("\x1b[K", position):
            del lines[-1][column:]
            position += 3
            continue
        character = text[position]
        position += 1
        if character == "\n":
            lines.append([])
        elif character == "\r":
            column = 0
        else:
            if column == COLUMNS:
                lines.append([])
                column = 0
            lines[-1][column : column + 1] = [character]
            column += 1
    return ["".join(line).rstrip() for line in lines]


@pytest.fixture
def terminal(monkeypatch):
    """Return a terminal to write to, and a function that returns what it shows."""
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    with os.fdopen(slave, "w") as stream:
        yield stream, lambda: screen(read_until(master, b"FITS").decode())
    os.close(master)


def read_until(descriptor, end):
    found = b""
    while not found.endswith(end):
        found += os.read(descriptor, 4096)
    return found


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        ("", ["FITS"]),
        ("done\n", ["done", "FITS"]),
        (" 50%|###", [" 50%|###", "FITS"]),
        ("1", ["1", "FITS"]),
        ("x" * COLUMNS, ["x" * COLUMNS, "FITS"]),
        ("bar 1\rbar 2", ["bar 2", "FITS"]),
    ],
)
def test_output_begins_on_a_line_of_its_own(script, lines, terminal):
    stream, shown = terminal
    stream.write(script)
    move_to_line_start(stream)
    stream.write("FITS")
    stream.flush()
    assert shown() == lines


def test_nothing_is_written_where_there_is_no_terminal(tmp_path):
    with (tmp_path / "log").open("w") as log:
        move_to_line_start(log)
    assert (tmp_path / "log").read_text() == ""
