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
POOLS = ((0, 0), (0, 1), (0, 2))
SELDOM = [ask for ask in Ask if ask not in (Ask.MALLOC, Ask.FREE, Ask.FREE_LATER, Ask.USE, Ask.CAPTURE_END)]
SELDOM += 4 * [Ask.GONE_ON]
MANY = (30, 200)  # blocks that live at a time


class Script:
    """Asks for whatever a script may ask for."""

    def __init__(self, dice):
        self.asked = Requests(pools=POOLS)
        self._dice = dice
        self._streams, self._many = dice.choice(STREAMS), dice.choice(MANY)
        self._live, self._later = [], []
        self._capturing, self._pool = False, 0

    def go_on(self, event):
        dice, few = self._dice, len(self._live) < self._many
        kinds = {"malloc": 65 if few else 35, "free": 35 if few else 65, "use": 2, "seldom": 4}
        (kind,) = dice.choices(tuple(kinds), kinds.values())
        if kind == "malloc" or not self._live:
            size, stream = random_size(dice), dice.choice(self._streams)
            self.asked.add(Ask.MALLOC, event, event, size, stream, self._pool)
            self._live.append(event)
        elif kind == "use":
            self.asked.add(Ask.USE, event, dice.choice(self._live), stream=dice.choice(self._streams))
        elif kind == "free":
            self._free(event, self._live.pop(dice.randrange(len(self._live))))
        else:
            self._seldom(event)

    def _free(self, event, block):
        later = self._dice.random() < 0.1
        self.asked.add(Ask.FREE_LATER if later else Ask.FREE, event, block)
        self._later += [block] if later else []

    def _seldom(self, event):
        dice, asked = self._dice, self.asked
        ask = dice.choice(SELDOM)
        if ask is Ask.GONE_ON and self._later:
            asked.add(ask, event, self._later.pop(dice.randrange(len(self._later))))
        elif ask is Ask.CAPTURE_BEGIN:
            asked.add(Ask.CAPTURE_END if self._capturing else Ask.CAPTURE_BEGIN, event)
            self._capturing = not self._capturing
        elif ask is Ask.FAILED:
            asked.add(ask, event, -1, dice.randint(1, 1 << 34), dice.choice(self._streams), self._pool)
        elif ask in (Ask.RELEASE_POOL, Ask.EMPTY_POOL):
            asked.add(ask, event, pool=self._pool)
            self._pool = dice.randrange(3)
        else:
            asked.add(ask, event)


def random_requests(dice, count):
    """Return what a script may ask for."""
    script = Script(dice)
    for event in range(count):
        script.go_on(event)
    return script.asked


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
        st.tuples(
            st.sampled_from(Ask),
            st.integers(-2, 12),
            st.integers(-1, 1 << 62),
            st.integers(0, 2),
            st.integers(-1, 3),
        )
    ),
    total=st.integers(1, 1 << 62),
)
def test_whatever_is_asked_is_served_or_refused(conf, rows, total):
    asked = Requests()
    for ask, block, size, stream, pool in rows:
        asked.add(ask, 0, block, size, stream, pool)
    with native.opened(
        AllocatorConfig.of(conf), blocks=12, pools=POOLS, total=total, taken=0, version=(2, 14)
    ) as allocator:
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
        ((Ask.MALLOC, 8, 512), 1),
        ((Ask.MALLOC, 1, 512, 0, 3), 1),  # pools are 0 to 2
        ((Ask.MALLOC, 1, 512, 0, -1), 1),
        ((Ask.RELEASE_POOL, -1, 0, 0, 1 << 40), 1),
        ((Ask.CAPTURE_END, -1), 1),  # none was begun
        ((99, 0), 1),
    ],
)
def test_what_cannot_be_is_refused(row, position):
    asked = Requests()
    for ask, block, size in ((Ask.MALLOC, 0, 512), (Ask.FREE, 0, 0)):
        asked.add(ask, 0, block, size)
    with native.opened(
        AllocatorConfig(), blocks=8, pools=POOLS, total=GIB, taken=0, version=(2, 14)
    ) as allocator:
        assert allocator.serve(asked)
        bad = Requests()
        bad.add(Ask.EMPTY_CACHE, 0)
        ask, block, *rest = row
        bad.add(ask, 0, block, *rest)
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
