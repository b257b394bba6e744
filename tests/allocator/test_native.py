"""The compiled allocator does what ``caching.py`` does, and cannot be led astray."""

import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from watched import CONFS, random_size

from memfit.allocator import native
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.replay import replay
from memfit.allocator.requests import Ask, Requests
from memfit.errors import UsageError
from memfit.ghost.compiler import COMPILE_FLAGS, find_compiler

CHECK = Path(__file__).with_name("serve.c")
GIB = 1 << 30
STREAMS = ([0], [0, 7], [0, -5, 1 << 50])
MANY = (30, 200)  # blocks that live at a time


def random_requests(dice, count):
    """Return what a script may ask for, and where it fails, other streams and steps."""
    asked, live, later = Requests(), [], []
    streams, many = dice.choice(STREAMS), dice.choice(MANY)
    for event in range(count):
        kind = dice.random()
        if kind < 0.005:
            asked.add(Ask.EMPTY_CACHE, event)
        elif kind < 0.01:
            asked.add(Ask.STEP, event)
        elif kind < 0.015:
            asked.add(Ask.FAILED, event, size=dice.randint(1, 1 << 34), stream=dice.choice(streams))
        elif kind < 0.06 and later:
            asked.add(Ask.GONE_ON, event, later.pop(dice.randrange(len(later))))
        elif live and dice.random() < (0.35 if len(live) < many else 0.65):
            block = live.pop(dice.randrange(len(live)))
            asked.add(Ask.FREE_LATER if kind > 0.9 else Ask.FREE, event, block)
            later += [block] if kind > 0.9 else []
        else:
            live.append(event)
            asked.add(Ask.MALLOC, event, event, random_size(dice), dice.choice(streams))
    return asked


def both(asked, config, **options):
    """Replay requests by the compiled allocator and in Python."""
    assert native.load() is not None
    compiled = replay(asked, config, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load", lambda: None)
        return compiled, replay(asked, config, **options)


@pytest.mark.parametrize("conf", [*CONFS, "roundup_power2_divisions:8", "max_split_size_mb:20"])
@pytest.mark.parametrize("seed", range(6))
def test_replays_are_equal(conf, seed):
    dice = random.Random(f"{conf} {seed}")  # noqa: S311
    options = {
        "total": dice.choice((1, 3, 8, 80)) * GIB,
        "taken": dice.choice((0, 300 << 20)),
        "version": dice.choice(((2, 8), (2, 14))),
        "empty_cache_each_step": dice.random() < 0.3,
    }
    compiled, interpreted = both(random_requests(dice, 1200), AllocatorConfig.of(conf), **options)
    assert compiled == interpreted


@settings(max_examples=60, deadline=None)
@given(
    conf=st.sampled_from(CONFS),
    rows=st.lists(
        st.tuples(st.sampled_from(Ask), st.integers(-2, 12), st.integers(-1, 1 << 62), st.integers(0, 2))
    ),
    total=st.integers(1, 1 << 62),
)
def test_whatever_is_asked_is_served_or_refused(conf, rows, total):
    asked = Requests()
    for ask, block, size, stream in rows:
        asked.add(ask, 0, block, size, stream)
    with native.opened(asked, AllocatorConfig.of(conf), total=total, taken=0, version=(2, 14)) as allocator:
        if allocator is None:
            assert total > 1 << 60
            return
        with suppress(UsageError):  # what cannot be
            allocator.serve(asked)
        figures = allocator.memory_stats()
        segments = allocator.snapshot()
    assert sum(segment.size for segment in segments) == figures["reserved_bytes.all.current"] <= total


@pytest.mark.parametrize(
    ("row", "position"),
    [
        ((Ask.FREE, 0), 1),  # was freed before
        ((Ask.FREE, 5), 1),
        ((Ask.FREE, -1), 1),
        ((Ask.FREE_LATER, 1 << 40), 1),
        ((Ask.MALLOC, 1, 0), 1),
        ((Ask.MALLOC, 1, -512), 1),
        ((Ask.MALLOC, -1, 512), 1),
        ((99, 0), 1),
    ],
)
def test_what_cannot_be_is_refused(row, position):
    asked = Requests()
    for ask, block, size in ((Ask.MALLOC, 0, 512), (Ask.FREE, 0, 0)):
        asked.add(ask, 0, block, size)
    ask, block, *size = row
    sized = Requests()  # how many blocks there are is told before what is asked for
    sized.add(Ask.MALLOC, 0, 8, 512)
    with native.opened(sized, AllocatorConfig(), total=GIB, taken=0, version=(2, 14)) as allocator:
        assert allocator.serve(asked)
        bad = Requests()
        bad.add(Ask.EMPTY_CACHE, 0)
        bad.add(ask, 0, block, *size)
        with pytest.raises(UsageError, match=rf"Request {position} of 2 cannot be served"):
            allocator.serve(bad)


def test_numbers_beyond_64_bits_are_served_in_python():
    asked = Requests()
    asked.add(Ask.MALLOC, 0, 0, 1 << 47)
    assert replay(asked, AllocatorConfig(), total=1 << 70).fits
    assert replay(asked, AllocatorConfig(max_split_size=1 << 80), total=1 << 50).fits


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Give an empty cache folder; what was loaded before is forgotten."""
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    native.load.cache_clear()
    yield tmp_path / "allocator"
    native.load.cache_clear()


def test_without_a_compiler_it_is_done_in_python(elsewhere, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert native.load() is None
    assert replay(random_requests(random.Random(0), 100), AllocatorConfig(), total=80 * GIB).fits  # noqa: S311
    assert not list(elsewhere.glob("*"))


def test_it_is_compiled_once_and_anew_when_damaged(elsewhere):
    load = [sys.executable, "-c", "from memfit.allocator import native; assert native.load()"]
    subprocess.run(load, check=True)
    (library,) = elsewhere.iterdir()
    made = library.stat().st_mtime_ns
    subprocess.run(load, check=True)
    assert library.stat().st_mtime_ns == made
    library.write_bytes(library.read_bytes()[:100])
    subprocess.run(load, check=True)
    assert library.stat().st_size > 1000


def test_under_sanitizers(tmp_path):
    check = tmp_path / "check"
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover")
    (tmp_path / "nothing.c").write_text("int main(void) { return 0; }\n")
    trial = [*find_compiler(), *sanitizers, str(tmp_path / "nothing.c"), "-o", str(tmp_path / "nothing")]
    if subprocess.run(trial, capture_output=True, check=False).returncode:
        pytest.skip("this compiler has no sanitizers")
    command = [*find_compiler(), *COMPILE_FLAGS, "-Werror", "-g", *sanitizers, f"-I{native.SOURCES}"]
    sources = [CHECK, *sorted(native.SOURCES.glob("*.c"))]
    subprocess.run([*command, *map(str, sources), "-o", str(check)], check=True)
    done = subprocess.run([str(check), "0", "40"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "served" in done.stdout
