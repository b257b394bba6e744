"""Settings, parsed by PyTorch on the ghost and by memfit: both accept or both refuse them."""

import json
import os
import subprocess
import sys

import pytest

from memfit.allocator.config import AllocatorConfig
from memfit.errors import UsageError

pytestmark = pytest.mark.process

CONFS = (
    "",
    "a",
    ":",
    ",",
    "max_split_size_mb",
    "max_split_size_mb:",
    "max_split_size_mb:19",
    "max_split_size_mb:20",
    "max_split_size_mb:21",
    "max_split_size_mb:0",
    "max_split_size_mb:abc",
    "max_split_size_mb:0x40",
    "max_split_size_mb:99999999999999999999",
    "max_split_size_mb:[64]",
    "max_split_size_mb:64,",
    "max_split_size_mb:64,,",
    ",max_split_size_mb:64",
    "max_split_size_mb:64 max_split_size_mb:128",
    "max_split_size_mb:64,max_split_size_mb:128",
    "max_split_size_mb:064",
    "  max_split_size_mb : 64 ",
    "max_split_size_mb;64",
    "Max_Split_Size_MB:64",
    "large_segment_size_mb:10",
    "large_segment_size_mb:11",
    "large_segment_size_mb:40,max_split_size_mb:30",
    "max_split_size_mb:30,large_segment_size_mb:40",
    "large_segment_size_mb:12,max_split_size_mb:12",
    "max_non_split_rounding_mb:19",
    "max_non_split_rounding_mb:20",
    "max_non_split_rounding_mb:21",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1",
    "garbage_collection_threshold:0.5",
    "garbage_collection_threshold:.5",
    "garbage_collection_threshold:x",
    "garbage_collection_threshold:-0.5",
    "garbage_collection_threshold:nan",
    "per_process_memory_fraction:0",
    "per_process_memory_fraction:1",
    "per_process_memory_fraction:1.5",
    "per_process_memory_fraction:-0.1",
    "per_process_memory_fraction:0.5",
    "expandable_segments:true",
    "expandable_segments:1",
    "expandable_segments:False",
    " expandable_segments:Tr ue",
    "throw_on_cudamalloc_oom:True",
    "throw_on_cudamalloc_oom:no",
    "unknown:1",
    "roundup_bypass_threshold_mb:10",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:1",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[]",
    "roundup_power2_divisions:[256:1,512:2,>:4]",
    "roundup_power2_divisions:[256:0,512:2]",
    "roundup_power2_divisions:[256:1,512:2,>:4",
    "roundup_power2_divisions:[256:1 512:2]",
    "roundup_power2_divisions:[300:1]",
    "roundup_power2_divisions:[256:3]",
    "roundup_power2_divisions:[512:2,256:4]",
    "roundup_power2_divisions:[>:4]",
    "roundup_power2_divisions:[256:1,],max_split_size_mb:64",
    "backend:native",
    "backend:foo",
    "release_lock_on_cudamalloc:True",
    "pinned_use_background_threads:True",
    "pinned_max_round_threshold_mb:4",
    "graph_capture_record_stream_reuse:True",
)

# PyTorch reads the leading number of these and ignores the rest; memfit refuses them as likely typos.
BY_ACCIDENT = (
    "max_split_size_mb:128abc",
    "max_split_size_mb:64.5",
    "max_split_size_mb:+64",
    "max_split_size_mb:-1",
    "garbage_collection_threshold:0.5x",
    "garbage_collection_threshold:5e-1",
)
# PyTorch refuses these values. The settings do not affect device memory, and memfit ignores their values.
HOST_SETTINGS = ("pinned_num_register_threads:3", "pinned_num_register_threads:300")

SCRIPT = """
import json, sys
from memfit.devices import find_device
from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.ghost_device import GhostDevice
from memfit.ghost.load_ghost import load

load(build_ghost()).configure(GhostDevice.of(find_device("A100-80GB"), 1 << 33))
import torch

found = []
for conf in json.loads(sys.argv[1]):
    # Some settings persist when a later string does not mention them.
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20,expandable_segments:False")
    try:
        torch._C._accelerator_setAllocatorSettings(conf)
        found.append(torch.cuda.memory._snapshot()["allocator_settings"])
    except (ValueError, IndexError, RuntimeError) as error:
        found.append(str(error).splitlines()[0])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def pytorch_results():
    """Return PyTorch's result for each string: its settings, or its error."""
    confs = [*CONFS, *BY_ACCIDENT, *HOST_SETTINGS]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(confs)],
        env={**os.environ, "PYTORCH_ALLOC_CONF": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(confs, json.loads(done.stdout), strict=True))


def memfit_settings(conf):
    """Return memfit's settings; None if it refuses the string."""
    try:
        config = AllocatorConfig.of(conf)
    except UsageError:
        return None
    return {
        "max_split_size": -1 if config.max_split_size is None else config.max_split_size,
        "garbage_collection_threshold": config.garbage_collection_threshold,
        "expandable_segments": config.expandable_segments,
        "roundup_power2_divisions": {
            str(1 << interval): count for interval, count in enumerate(config.roundup_power2_divisions)
        },
    }


@pytest.mark.parametrize("conf", CONFS)
def test_pytorch_and_memfit_parse_the_same_settings(pytorch_results, conf):
    theirs, ours = pytorch_results[conf], memfit_settings(conf)
    if isinstance(theirs, str):
        assert ours is None, theirs
    else:
        assert ours is not None
        assert ours == {name: theirs[name] for name in ours}


@pytest.mark.parametrize("conf", BY_ACCIDENT)
def test_values_that_pytorch_accepts_by_accident_are_refused(pytorch_results, conf):
    assert isinstance(pytorch_results[conf], dict)
    with pytest.raises(UsageError, match=conf.split(":")[0]):
        AllocatorConfig.of(conf)


@pytest.mark.parametrize("conf", HOST_SETTINGS)
def test_settings_that_do_not_affect_device_memory_are_accepted(pytorch_results, conf):
    assert isinstance(pytorch_results[conf], str)
    assert AllocatorConfig.of(conf) == AllocatorConfig()
