"""Allocator settings in PyTorch's grammar."""

import pytest

from memfit.allocator.config import AllocatorConfig, parse_allocator_conf
from memfit.errors import UsageError

MIB = 1 << 20


def test_defaults_are_pytorchs():
    config = AllocatorConfig.read({})
    assert config == AllocatorConfig()
    assert config.has_segments
    assert config.max_split_size is None
    assert config.large_segment_size == 20 * MIB
    assert config.roundup_power2_divisions == (0,) * 16


def test_white_space_is_dropped_everywhere():
    assert parse_allocator_conf(" max_split_size_mb : 1 28,\texpandable_segments:True ") == {
        "max_split_size_mb": "128",
        "expandable_segments": "True",
    }


def test_settings_that_do_not_affect_sizes_are_accepted():
    assert parse_allocator_conf("garbage_collection_threshold:0.8,pinned_use_background_threads:True") == {
        "garbage_collection_threshold": "0.8",
        "pinned_use_background_threads": "True",
    }


def test_every_setting_is_parsed():
    config = AllocatorConfig.read(
        {"conf": "max_split_size_mb:64,large_segment_size_mb:48,expandable_segments:True"}
    )
    assert config.max_split_size == 64 * MIB
    assert config.large_segment_size == 48 * MIB
    assert config.expandable_segments


def test_an_individual_setting_takes_precedence_over_the_string():
    settings = {"conf": "expandable_segments:True", "expandable_segments": "False"}
    assert not AllocatorConfig.read(settings).expandable_segments


@pytest.mark.parametrize(
    "settings", [{"conf": "backend:cudaMallocAsync"}, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}]
)
def test_cuda_malloc_async_and_disabled_caching_have_no_segments(settings):
    assert not AllocatorConfig.read(settings).has_segments


# Expected lists are what torch.cuda.memory._snapshot()["allocator_settings"] gave, PyTorch 2.14.1.
@pytest.mark.parametrize(
    ("value", "divisions"),
    [
        ("4", (4,) * 16),
        ("[1:2,64:4,>:8]", (2, 0, 0, 0, 0, 0, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8)),
        ("[256:1,512:2,1024:4,>:8]", (1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8)),
        ("[65536:2]", (2,) * 16),
    ],
)
def test_roundup_power2_divisions_expand_to_one_divisor_per_power_of_two(value, divisions):
    assert AllocatorConfig.read({"roundup_power2_divisions": value}).roundup_power2_divisions == divisions


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ("max_split_size_mb", "'max_split_size_mb'"),
        ("max_split_size_mb:64,,", "','"),
        ("roundup_power2_divisions:[1:2", "'roundup_power2_divisions:[1:2'"),
        ("max_split_size_mb:lots", "max_split_size_mb:lots"),
        ("max_split_size_mb:-1", "max_split_size_mb:-1"),
        ("expandable_segments:true", "expandable_segments:true"),
        ("roundup_power2_divisions:3", "'3' is not a power of two"),
        ("roundup_power2_divisions:[x:2]", "'x' is not a power of two"),
        ("roundup_power2_divisions:[1:6]", "'6' is not a power of two"),
    ],
)
def test_settings_that_pytorch_refuses_are_refused(conf, words):
    with pytest.raises(UsageError) as caught:
        AllocatorConfig.read({"conf": conf})
    assert words in str(caught.value)
