"""Answers of the installed cuDNN: figures of one version, which no card has confirmed."""

import dataclasses
import os
import subprocess
import sys

import pytest

from memfit.devices import find_device
from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.cudnn.client import NoCudnnAnswerError, find_library_loaded_by_torch, installed_cudnn_client
from memfit.ghost.cudnn.server import OLDEST
from memfit.ghost.ghost_device import GhostDevice
from memfit.native_build import find_compiler
from support.cudnn_descriptors import FALLBACK, convolution

pytestmark = pytest.mark.process

# cuDNN 9.24.0: workspace bytes of its first choice for 64 to 64 channels, 3x3, on 1x64x224x224 in float32.
FIRST_CHOICE = {
    "A100-80GB": {"forward": 12_992_528, "data gradient": 25_837_584, "weight gradient": 28_787_243},
    "H100-80GB": {"forward": 12_992_528, "data gradient": 25_837_715, "weight gradient": 27_754_640},
    "RTX-3060": {"forward": 409_856, "data gradient": 409_856, "weight gradient": 26_870_223},
    "GTX-1660": {"forward": 409_856, "data gradient": 409_856, "weight gradient": 0},
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Use an empty cache, so that no answer is from an earlier run; the ghost itself is built already."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "ghost").symlink_to(build_ghost().folder.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMFIT_CACHE", str(folder))
        yield folder


def installed(gpu):
    client = installed_cudnn_client(GhostDevice.of(find_device(gpu)), build_ghost())
    try:
        version = client.answer(convolution("forward")).version
    except NoCudnnAnswerError as error:
        pytest.skip(f"the installed cuDNN cannot be queried: {error}")
    assert version >= OLDEST
    return client, version


@pytest.mark.parametrize("gpu", FIRST_CHOICE)
def test_first_choices_of_cudnn_9_24(gpu):
    client, version = installed(gpu)
    if version != 92_400:
        pytest.skip(f"the figures are those of cuDNN 9.24.0; the installed version is {version}")
    for operation, size in FIRST_CHOICE[gpu].items():
        first, *others = client.answer(convolution(operation)).configurations
        assert first.workspace == size
        assert others, "PyTorch has engines to fall back on"


def test_some_fallback_engine_needs_no_workspace():
    client, _ = installed("A100-80GB")
    configs = client.answer(convolution("weight gradient", mode=FALLBACK)).configurations
    assert min(config.workspace for config in configs) == 0


DECOY = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void loaded(void) { fclose(fopen(getenv("DECOY_LOADED"), "w")); }
int cuInit(unsigned flags) { (void)flags; return 0; }
"""


@pytest.mark.parametrize("shielded", [True, False])
def test_the_machines_driver_is_never_loaded(tmp_path, monkeypatch, shielded):
    """The substitute for libcuda.so.1 prevents it; without the substitute, cuDNN loads what it finds."""
    (tmp_path / "decoy.c").write_text(DECOY)
    for name in ("libcuda.so.1", "libcuda.so"):
        subprocess.run(
            [*find_compiler(), "-shared", "-fPIC", "decoy.c", "-o", name], cwd=tmp_path, check=True
        )
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}")
    monkeypatch.setenv("DECOY_LOADED", str(tmp_path / "loaded"))
    if not shielded:
        empty = ("-shared", "-xc", "/dev/null", "-o", "none.so")
        subprocess.run([*find_compiler(), *empty], cwd=tmp_path, check=True)
        unshielded = dataclasses.replace(build_ghost(), no_device=tmp_path / "none.so")
        monkeypatch.setattr(sys.modules[__name__], "build_ghost", lambda: unshielded)
    client, _ = installed("A100-80GB")
    # A question that is not cached; the fallbacks include engines that are compiled at run time.
    client.answer(convolution("forward", images=3 + shielded, mode=FALLBACK))
    assert (tmp_path / "loaded").exists() != shielded
    assert bool(client.missed) != shielded, "the substitute has every function that cuDNN looks up"


def test_the_library_installed_with_torch_is_found_first(tmp_path, monkeypatch):
    torch = tmp_path / "site-packages" / "torch"
    elsewhere = tmp_path / "system"
    beside = torch.parent / "nvidia" / "cudnn" / "lib"
    for folder in (torch / "lib", beside, elsewhere):
        folder.mkdir(parents=True)
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("memfit.ghost.cudnn.client._SYSTEM", ())
    monkeypatch.setenv("LD_LIBRARY_PATH", str(elsewhere))
    name = "libcudnn.so.9999"
    assert find_library_loaded_by_torch(name, torch) is None
    (elsewhere / name).touch()
    assert find_library_loaded_by_torch(name, torch) == elsewhere / name
    (beside / name).touch()
    assert find_library_loaded_by_torch(name, torch) == beside / name
