"""Allocator settings: what each text means, and that PyTorch itself reads it the same way."""

import ctypes
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from memsize import AllocatorConfig
from memsize.errors import InputError
from tests.gpus import IGNORED, settings_in

MiB = 1 << 20
SYMBOL = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"


@pytest.fixture(scope="module")
def settings():
    """PyTorch's own parser of these texts; it also runs in builds without CUDA. Left as it was found."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):  # 2.11 can set them, but not read them back
        pytest.skip("this PyTorch does not let its parser be called and undone")
    before = torch._C._accelerator_getAllocatorSettings()
    yield torch._C._accelerator_setAllocatorSettings
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.fixture(scope="module")
def divisions(settings):
    """PyTorch's own count of divisions for a request of so many bytes."""
    import torch

    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    function = getattr(library, SYMBOL, None)
    if function is None:
        pytest.skip("the function has another name in this PyTorch")
    function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    return function


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": True}),
        ("max_split_size_mb:128", {"max_split_size": 128 * MiB}),
        (
            "max_split_size_mb:64, max_non_split_rounding_mb:32",
            {"max_split_size": 64 * MiB, "max_non_split_rounding": 32 * MiB},
        ),
        ("garbage_collection_threshold:0.6", {"garbage_collection_threshold": 0.6}),
        ("large_segment_size_mb:40,max_split_size_mb:40", {"large_segment_size": 40 * MiB, "max_split_size": 40 * MiB}),
        ("per_process_memory_fraction:0.5", {"memory_fraction": 0.5}),
        ("per_process_memory_fraction:1", {}),
        ("per_process_memory_fraction:0", {"memory_fraction": 0.0}),
        (
            "max_split_size_mb:20,max_non_split_rounding_mb:20",
            {"max_split_size": 20 * MiB, "max_non_split_rounding": 20 * MiB},
        ),
        ("large_segment_size_mb:11,max_split_size_mb:11", {"large_segment_size": 11 * MiB, "max_split_size": 11 * MiB}),
        ("roundup_power2_divisions:1", {"roundup_divisions": (1,) * 16}),
        ("roundup_power2_divisions:[1:2]", {"roundup_divisions": (2, *[0] * 15)}),
        ("roundup_power2_divisions:[32768:2]", {"roundup_divisions": (2,) * 16}),
        ("roundup_power2_divisions:[65536:2]", {"roundup_divisions": (2,) * 16}),
        ("roundup_power2_divisions:[2:4,4:0,>:8]", {"roundup_divisions": (4, 4, 0, *[8] * 13)}),
        ("roundup_power2_divisions:4", {"roundup_divisions": (4,) * 16}),
        ("backend:native,expandable_segments:False,", {}),
        (",".join(f"{key}:1" for key in sorted(IGNORED)), {}),
    ],
)
def test_text_to_config(text, expected):
    assert AllocatorConfig.parse(text) == AllocatorConfig(**expected)


def test_settings_that_change_no_size_are_known_by_name():
    # The pinned-memory settings of c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h
    assert set(IGNORED) == {
        "graph_capture_record_stream_reuse", "pinned_free_catch_all", "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb", "pinned_num_register_threads", "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "throw_on_cudamalloc_oom",
    }  # fmt: skip


def test_all_defaults_are_pytorchs():
    config = AllocatorConfig()
    assert not config.expandable_segments
    assert config.max_split_size is None and config.max_non_split_rounding is None
    assert config.roundup_divisions == (0,) * 16
    assert (config.garbage_collection_threshold, config.memory_fraction) == (0.0, 1.0)
    assert config.large_segment_size == 20 * MiB


def test_spaces_and_a_last_comma_do_not_matter():
    spaced = AllocatorConfig.parse(" max_split_size_mb : 64 , roundup_power2_divisions:[ 1 : 2 , > : 4 ] ,")
    assert spaced.max_split_size == 64 * MiB
    assert spaced.roundup_divisions == (2, *[4] * 15)


def test_list_of_divisions():
    # 64 MiB is 2^6 MiB: entries 0 to 6 are 8; 256 MiB is entry 8; above 1 GiB (entry 10) there is no rounding
    parsed = AllocatorConfig.parse("roundup_power2_divisions:[64:8,256:4,1024:4,>:1]")
    assert parsed.roundup_divisions == (8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 4, 1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_mb:128", "no allocator setting 'max_split_mb': known are backend, expandable_segments"),
        ("max_split_size_mb", "max_split_size_mb needs a value"),
        ("max_split_size_mb:", "max_split_size_mb needs a value"),
        ("max_split_size_mb:19", "max_split_size_mb must be at least 20, got 19"),
        ("max_non_split_rounding_mb:19", "max_non_split_rounding_mb must be at least 20, got 19"),
        ("max_split_size_mb:2.5", "max_split_size_mb must be a whole number, got 2.5"),
        ("garbage_collection_threshold:0", "must lie between 0 and 1, got 0"),
        ("garbage_collection_threshold:1", "must lie between 0 and 1, got 1"),
        ("per_process_memory_fraction:nan", "must lie between 0 and 1, got nan"),
        ("max_split_size_mb=", "no allocator setting 'max_split_size_mb='"),
        ("per_process_memory_fraction:1.5", "must lie between 0 and 1, got 1.5"),
        ("per_process_memory_fraction:-0.5", "must lie between 0 and 1, got -0.5"),
        ("expandable_segments:false", "must be True or False, got false"),
        ("roundup_power2_divisions:0", "takes powers of two, got 0"),
        ("max_split_size_mb:10", "max_split_size_mb must be at least 20, got 10"),
        ("large_segment_size_mb:40,max_split_size_mb:30", "must be at least 40, got 30"),
        ("large_segment_size_mb:10", "must be above 10, got 10"),
        ("max_non_split_rounding_mb:4", "must be at least 20, got 4"),
        ("expandable_segments:true", "must be True or False, got true"),
        ("garbage_collection_threshold:1.5", "must lie between 0 and 1, got 1.5"),
        ("garbage_collection_threshold:high", "must be a number, got high"),
        ("roundup_power2_divisions:3", "takes powers of two, got 3"),
        ("roundup_power2_divisions:[3:2]", "takes powers of two, got 3"),
        ("roundup_power2_divisions:[64:8", "misses its closing bracket"),
        ("backend:cudaMallocAsync", "only PyTorch's native one is simulated"),
        ("max_split_size_mb=128", "no allocator setting 'max_split_size_mb=128'"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(InputError) as error:
        AllocatorConfig.parse(text)
    assert message in str(error.value)


def test_environment():
    assert settings_in({"PATH": "/bin"}) == ""
    assert settings_in({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}) == "expandable_segments:True"
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}
    assert settings_in(both) == "max_split_size_mb:32"


@pytest.mark.parametrize(
    ("request_bytes", "block"),
    [(1, 512), (512, 512), (513, 1024), (1000, 1024), (MiB, MiB), (MiB + 1, MiB + 512)],
)
def test_plain_rounding(request_bytes, block):
    assert AllocatorConfig().block_size(request_bytes) == block


@pytest.mark.parametrize(
    ("request_bytes", "block"),
    [
        (1200, 1536),  # not above 4 · 512 = 2048: multiples of 512
        (2049, 2560),  # between 2048 and 4096 the steps are 512: 2560
        (1_200_000, 1_310_720),  # 1 MiB + one quarter
        (5 * MiB, 5 * MiB),  # 4 MiB + one quarter, exactly
        (9 * MiB, 10 * MiB),  # 8 MiB in quarters of 2 MiB
        (16 * MiB, 16 * MiB),  # a power of two
    ],
)
def test_rounding_to_quarters_of_a_power_of_two(request_bytes, block):
    assert AllocatorConfig.parse("roundup_power2_divisions:4").block_size(request_bytes) == block


@pytest.mark.parametrize("exponent", range(20, 36))
def test_each_power_of_two_has_divisions_of_its_own(exponent):
    # Entry k is for requests from 2^k MiB: two halves there, and multiples of 512 B on either side
    config = AllocatorConfig(roundup_divisions=tuple(2 * (k == exponent - 20) for k in range(16)))
    start = 1 << exponent
    assert config.block_size(start) == start
    assert config.block_size(start + 1) == start + start // 2
    assert config.block_size(2 * start - 1) == 2 * start
    if exponent < 35:
        assert config.block_size(2 * start + 1) == 2 * start + 512
    if exponent > 20:
        assert config.block_size(start - 512) == start - 512


def test_the_first_entry_holds_below_1_mib_and_the_last_one_above_32_gib():
    ends = AllocatorConfig(roundup_divisions=(2, *[0] * 14, 2))
    assert ends.block_size(512 * 1024 + 1) == 768 * 1024
    assert ends.block_size((64 << 30) + 1) == 96 << 30


@pytest.mark.parametrize(
    ("request_bytes", "divisions", "block"),
    [
        (2048, 4, 2048),
        (4096, 8, 4096),
        (4097, 8, 4608),  # above 8 · 512: eighths of 4096 are 512 B
        (4097, 4, 5120),  # quarters are 1,024 B
        (1025, 2, 1536),  # above 2 · 512: halves of 1024 are 512 B
        (5000, 1, 5120),  # one division is none
        (5000, 0, 5120),
        (0, 0, 512),
    ],
)
def test_divisions_begin_above_as_many_times_512_bytes(request_bytes, divisions, block):
    assert AllocatorConfig(roundup_divisions=(divisions,) * 16).block_size(request_bytes) == block


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MiB),
        (MiB, 2 * MiB),
        (MiB + 512, 20 * MiB),
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB),
        (10 * MiB + 512, 12 * MiB),
        (12 * MiB, 12 * MiB),
        (12 * MiB + 512, 14 * MiB),
        (100 * MiB, 100 * MiB),
    ],
)
def test_segment_sizes(block, segment):
    assert AllocatorConfig().segment_size(block) == segment


def test_memory_fraction():
    assert AllocatorConfig().allowed(100) is None
    assert AllocatorConfig(memory_fraction=0.25).allowed(1000) == 250
    assert AllocatorConfig(memory_fraction=0.3).allowed(9) == 2


powers = st.integers(0, 15).map(lambda exponent: 1 << exponent)
counts = st.sampled_from([0, 1, 2, 4, 8, 16])
pairs = st.lists(st.tuples(st.one_of(powers.map(str), st.just(">")), counts), min_size=1, max_size=5)


@given(pairs)
def test_divisions_are_pytorchs(divisions, settings, entries):
    text = "roundup_power2_divisions:[" + ",".join(f"{key}:{count}" for key, count in entries) + "]"
    settings(text)
    ours = AllocatorConfig.parse(text).roundup_divisions
    assert list(ours) == [divisions(MiB << exponent) for exponent in range(16)]
    assert divisions(1000) == ours[0]
    assert divisions(MiB << 20) == ours[15]


values = st.sampled_from(["True", "False", "0", "1", "20", "30", "0.5", "4", "[64:8,>:2]", "[3:2]", "x", ""])
keys = st.sampled_from(
    [
        "expandable_segments",
        "max_split_size_mb",
        "max_non_split_rounding_mb",
        "garbage_collection_threshold",
        "roundup_power2_divisions",
        "large_segment_size_mb",
    ]
)


@given(st.dictionaries(keys, values, min_size=1, max_size=3))
def test_refused_exactly_where_pytorch_refuses(settings, entries):
    text = ",".join(f"{key}:{value}" for key, value in entries.items())
    if "large_segment_size_mb" not in entries:
        settings("large_segment_size_mb:20")
    assert _accepts(AllocatorConfig.parse, text) == _accepts(settings, text), text


def _accepts(parse, text):
    try:
        parse(text)
    except (InputError, ValueError, RuntimeError):
        return False
    return True
