"""The compiled allocator equals the reference in Python, and rejects invalid requests."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.allocator import compiled_allocator
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.replay import replay_requests
from memfit.allocator.requests import AllocatorRequests, RequestKind
from memfit.errors import MemfitError, UsageError
from support.allocator_comparison.twins import POOLS, TWIN_CONFS, both, compare
from support.sanitized_build import run_check

CHECK = Path(__file__).with_name("check_allocator.c")
GIB = 1 << 30


@pytest.mark.parametrize("conf", TWIN_CONFS)
@pytest.mark.parametrize("seed", range(6))
def test_compiled_and_python_replays_are_equal(conf, seed):
    compare(conf, seed)


@settings(max_examples=60, deadline=None)
@given(
    conf=st.sampled_from(TWIN_CONFS),
    rows=st.lists(
        st.tuples(
            st.sampled_from(RequestKind),
            st.integers(-2, 12),
            st.integers(-1, 1 << 62),
            st.integers(0, 2),
            st.integers(-1, 3),
        )
    ),
    total=st.integers(1, 1 << 60),
)
def test_random_requests_are_served_or_refused(conf, rows, total):
    requests = AllocatorRequests()
    for kind, block, size, stream, pool in rows:
        requests.add(kind, 0, block, size, stream, pool)
    with compiled_allocator.open_compiled_allocator(
        AllocatorConfig.of(conf), blocks=12, pools=POOLS, total=total, taken=0, version=(2, 14)
    ) as allocator:
        with suppress(UsageError):  # impossible requests
            allocator.serve(requests)
        figures = allocator.memory_stats()
        segments = allocator.snapshot()
    assert sum(segment.size for segment in segments) == figures["reserved_bytes.all.current"] <= total


@pytest.mark.parametrize(
    ("row", "position"),
    [
        ((RequestKind.FREE, 0), 1),  # already freed
        ((RequestKind.FREE, 5), 1),
        ((RequestKind.FREE, -1), 1),
        ((RequestKind.FREE_LATER, 1 << 40), 1),
        ((RequestKind.MALLOC, 1, 0), 1),
        ((RequestKind.MALLOC, 1, -512), 1),
        ((RequestKind.MALLOC, -1, 512), 1),
        ((RequestKind.MALLOC, 8, 512), 1),
        ((RequestKind.MALLOC, 1, 512, 0, 3), 1),  # pools are 0 to 2
        ((RequestKind.MALLOC, 1, 512, 0, -1), 1),
        ((RequestKind.RELEASE_POOL, -1, 0, 0, 1 << 40), 1),
        ((RequestKind.CAPTURE_END, -1), 1),  # no capture was begun
        ((99, 0), 1),
    ],
)
def test_impossible_requests_are_refused(row, position):
    requests = AllocatorRequests()
    for kind, block, size in ((RequestKind.MALLOC, 0, 512), (RequestKind.FREE, 0, 0)):
        requests.add(kind, 0, block, size)
    with compiled_allocator.open_compiled_allocator(
        AllocatorConfig(), blocks=8, pools=POOLS, total=GIB, taken=0, version=(2, 14)
    ) as allocator:
        assert allocator.serve(requests)
        bad = AllocatorRequests()
        bad.add(RequestKind.EMPTY_CACHE, 0)
        kind, block, *rest = row
        bad.add(kind, 0, block, *rest)
        with pytest.raises(UsageError, match=rf"Request {position} of 2 cannot be served"):
            allocator.serve(bad)


def test_settings_that_pytorch_refuses_are_refused():
    with pytest.raises(UsageError, match="max_split_size must be at least large_segment_size"):
        replay_requests(
            AllocatorRequests(),
            AllocatorConfig(max_split_size=35 << 20, large_segment_size=55 << 20),
            total=GIB,
        )


def test_a_device_beyond_64_bits_is_refused():
    requests = AllocatorRequests()
    requests.add(RequestKind.MALLOC, 0, 0, 1 << 47)
    with pytest.raises(UsageError, match=r"a GPU of 1,180,591,620,717,411,303,424 bytes: the largest is"):
        replay_requests(requests, AllocatorConfig(), total=1 << 70)
    assert replay_requests(requests, AllocatorConfig(max_split_size=1 << 80), total=1 << 50).fits


def test_addresses_beyond_64_bits_are_refused():
    requests = AllocatorRequests()
    for number in range(20):  # a reservation of 9/8 of the device for each stream
        requests.add(RequestKind.MALLOC, 0, number, 512, stream=number)
    config = AllocatorConfig(expandable_segments=True)
    with pytest.raises(UsageError, match="expandable segments reserve there exceed 64 bits"):
        replay_requests(requests, config, total=1 << 60)
    compiled, interpreted = both(requests, config, total=1 << 40)
    assert compiled == interpreted
    assert len(compiled.segments) == 20


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """Return an empty cache folder for a process that has not loaded the library yet."""
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled_allocator.LIBRARY, "_loaded", None)
    return tmp_path / "allocator"


@pytest.mark.process
@pytest.mark.parametrize("compiler", ["no-such-compiler", "cc '", "false"])
def test_without_a_compiler_replays_are_refused_and_say_what_is_missing(empty_cache, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(MemfitError, match="Cannot build memfit's C code"):
        replay_requests(AllocatorRequests(), AllocatorConfig(), total=80 * GIB)
    assert replay_requests(AllocatorRequests(), AllocatorConfig(caching=False), total=80 * GIB).fits
    assert not list(empty_cache.glob("**/*"))


@pytest.mark.process
def test_the_library_is_compiled_once_and_recompiled_if_damaged(empty_cache):
    code = "from memfit.allocator.compiled_allocator import load; assert load()"
    load = [sys.executable, "-c", code]
    subprocess.run(load, check=True)
    (library,) = empty_cache.iterdir()
    compiled_at = library.stat().st_mtime_ns
    subprocess.run(load, check=True)
    assert library.stat().st_mtime_ns == compiled_at
    library.write_bytes(library.read_bytes()[:100])
    subprocess.run(load, check=True)
    assert library.stat().st_size > 1000


@pytest.mark.process
def test_random_requests_under_sanitizers(tmp_path):
    folder = compiled_allocator.LIBRARY.sources
    sources = [CHECK, *sorted(folder.glob("*.c"))]
    assert "served" in run_check(tmp_path / "check", sources, f"-I{folder}", arguments=("0", "40"))
