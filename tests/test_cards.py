"""Cards, library workspaces and the context: names, sizes, and the arithmetic behind them."""

import re
import subprocess
import sys

import pytest

from memsize.errors import InputError
from tests.gpus import CARDS, card, cublas_workspace, cublaslt_workspace, torch_release

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a100", "A100 40GB"),
        ("A100-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB", "A100 80GB"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        ("4090", "GeForce RTX 4090"),
        ("rtx 3060", "GeForce RTX 3060 12GB"),
        ("Tesla T4", "Tesla T4"),
        ("h100", "H100 80GB"),
        ("Tesla P100-PCIE-16GB", "Tesla P100 16GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "GeForce RTX 4060 Laptop"),
        ("NVIDIA RTX 5000 Ada Generation", "RTX 5000 Ada"),
        ("rtx2060", "GeForce RTX 2060"),
        ("2060 super", "GeForce RTX 2060 SUPER"),
        ("3080", "GeForce RTX 3080 10GB"),
        ("3080 12gb", "GeForce RTX 3080 12GB"),
        ("rtx 4060 ti", "GeForce RTX 4060 Ti 8GB"),
        ("rtx 4060 ti 16gb", "GeForce RTX 4060 Ti 16GB"),
        ("5060ti", "GeForce RTX 5060 Ti 16GB"),
        ("AMD Instinct MI300X", "Instinct MI300X"),
        ("mi250", "Instinct MI250X"),
        ("Apple 16GB", "Apple 16GB"),
        ("m1-16gb", "Apple 16GB"),
        ("M2 Max 64GB", "Apple 64GB"),
        ("MacBook Pro M3 36GB", "Apple 36GB"),
        ("mps-32gb", "Apple 32GB"),
    ],
)
def test_names(name, found):
    assert card(name).name == found


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("RTX 4091", "GeForce RTX 4090"),
        ("5090 Ti", "GeForce RTX 5090"),
        ("h10", "H100 80GB"),
        ("RTX 3090 24GB", "GeForce RTX 3090"),
        ("M2 Max", "Apple 8GB, Apple 16GB"),
    ],
)
def test_an_unknown_card_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(InputError, match=f"no GPU '{name}' in the table: did you mean {nearest}"):
        card(name)


@pytest.mark.parametrize("names", ["l4,a100", "t4, H100,l4"])
def test_several_cards_where_one_is_simulated(names):
    count = len(names.split(","))
    with pytest.raises(InputError, match=f"'{names}' names {count} GPUs, and one is simulated here: memsize fit, "):
        card(names)
    with pytest.raises(InputError, match="no GPU 'l4,a1000' in the table: did you mean"):
        card("l4,a1000")


@pytest.mark.parametrize(("size", "gpu"), [("48GB", "L40S"), ("15109 MiB", "Tesla T4"), ("0.5tb", "Apple 512GB")])
def test_a_size_is_no_card_and_the_nearest_ones_are_named(size, gpu):
    with pytest.raises(
        InputError, match=f"'{size}' is a size, not a GPU: did you mean .*{gpu}.*memsize fit has --budget"
    ):
        card(size)


def test_a_name_like_no_other_is_answered_with_all():
    with pytest.raises(InputError, match="known: Tesla P100 16GB"):
        card("?")


def test_every_name_and_alias_means_one_card():
    names = [name for entry in CARDS.values() for name in (entry.name, *entry.aliases)]
    assert [card(name).name for name in names] == [
        entry.name for entry in CARDS.values() for _ in (entry.name, *entry.aliases)
    ]


OF_A_MAKER = [entry for entry in CARDS.values() if entry.platform != "MPS"]


def test_a_process_gets_less_than_what_is_printed_on_the_box():
    for entry in OF_A_MAKER:
        assert entry.source, entry.name
        assert 0.89 * _nominal(entry.name) < entry.bytes / 1e9 < 1.08 * _nominal(entry.name), entry.name


def _nominal(name):
    """The gigabytes that the maker names."""
    sizes = {
        "Tesla T4": 16, "GeForce RTX 2080 Ti": 11, "A30": 24, "A10": 24, "A10G": 24, "GeForce RTX 3070": 8,
        "GeForce RTX 3090": 24, "RTX A4000": 16, "RTX A6000": 48, "L4": 24, "L40": 48, "L40S": 48, "RTX 6000 Ada": 48,
        "GeForce RTX 4060": 8, "GeForce RTX 4090": 24, "H100 NVL": 94, "H200": 141, "B200": 180, "B300": 288,
        "GeForce RTX 5090": 32, "A2": 16, "A16": 16, "A40": 48, "GeForce GTX 1080 Ti": 11, "TITAN RTX": 24,
        "GeForce RTX 2060": 6, "GeForce RTX 2060 SUPER": 8, "GeForce RTX 2070": 8, "GeForce RTX 2070 SUPER": 8,
        "GeForce RTX 2080": 8, "GeForce RTX 2080 SUPER": 8, "GeForce RTX 3060 Ti": 8, "GeForce RTX 3070 Ti": 8,
        "GeForce RTX 3070 Ti Laptop": 8, "GeForce RTX 3080 Ti": 12, "GeForce RTX 3090 Ti": 24,
        "GeForce RTX 4060 Laptop": 8, "GeForce RTX 4070": 12, "GeForce RTX 4070 SUPER": 12,
        "GeForce RTX 4070 Laptop": 8, "GeForce RTX 4070 Ti": 12, "GeForce RTX 4070 Ti SUPER": 16,
        "GeForce RTX 4080": 16, "GeForce RTX 4080 SUPER": 16, "GeForce RTX 5060": 8, "GeForce RTX 5070": 12,
        "GeForce RTX 5070 Ti": 16, "GeForce RTX 5080": 16, "Quadro RTX 5000": 16, "Quadro RTX 8000": 48,
        "RTX A4500": 20, "RTX A5000": 24, "RTX A5500": 24, "RTX 2000 Ada": 16, "RTX 4000 Ada": 20, "RTX 4500 Ada": 24,
        "RTX 5000 Ada": 32, "RTX PRO 6000 Blackwell": 96, "Instinct MI210": 64, "Instinct MI250X": 64,
        "Instinct MI300X": 192,
    }  # fmt: skip
    return sizes.get(name) or int(name.split()[-1].removesuffix("GB"))


def test_a_card_that_was_not_seen_says_whose_figure_it_has():
    derived = [entry for entry in CARDS.values() if "not seen" in entry.source]
    assert {entry.name for entry in derived} > {"A2", "GeForce RTX 5060", "RTX A2000 6GB", "Apple 96GB"}
    assert all(entry.source.startswith(("as the", "Metal's", "16,311 MiB")) for entry in derived)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        # What llama.cpp prints of Metal, in 10^6 bytes.
        (16, 11_453.25),
        (24, 17_179.89),
        (32, 22_906.50),
        (36, 28_991.03),
        (48, 38_654.71),
        (128, 103_079.22),
        # What PyTorch says is "max allowed", 1.7 times as much, in GiB: 9.07 and 81.60.
        (8, 9.07 * GiB / 1.7 / 1e6),
        (64, 81.60 * GiB / 1.7 / 1e6),
    ],
)
def test_what_metal_recommends(size, expected):
    assert card(f"Apple {size}GB").bytes / 1e6 == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        # two thirds up to 32 GiB, three quarters above
        (18, 12 * GiB),
        (24, 16 * GiB),
        (36, 27 * GiB),
        (96, 72 * GiB),
        (512, 384 * GiB),
    ],
)
def test_the_share_of_unified_memory(size, expected):
    entry = card(f"Apple {size}GB")
    assert entry.bytes == expected
    assert entry.source.startswith(
        f"Metal's recommendedMaxWorkingSetSize is {'two thirds' if size <= 32 else 'three quarters'} of the memory; "
    )


@pytest.mark.parametrize(
    ("name", "capability", "size"),
    [
        ("p100", (6, 0), 16_276 * MiB),
        ("v100", (7, 0), 16_932_908_564),  # 15.77 GiB
        ("t4", (7, 5), 15_633_680_957),  # 14.56 GiB
        ("a100", (8, 0), 42_298_834_944),
        ("a10g", (8, 6), 23_686_744_637),  # 22.06 GiB
        ("4070", (8, 9), 11_866 * MiB),
        ("h100", (9, 0), 84_943_715_697),  # 79.11 GiB
        ("b200", (10, 0), 191_501_854_310),  # 178.35 GiB
        ("b300", (10, 3), 287_440_686_285),  # 267.7 GiB
        ("5090", (12, 0), 32_109 * MiB),
    ],
)
def test_a_card_of_each_generation(name, capability, size):
    assert (card(name).capability, card(name).bytes) == (capability, size)


GENERATIONS = {
    (6, 0): "Tesla P100 16GB", (6, 1): "GeForce GTX 1080 Ti", (7, 0): "Tesla V100 16GB, Tesla V100 32GB",
    (7, 5): "Tesla T4, TITAN RTX, Quadro RTX 5000, Quadro RTX 8000", (8, 0): "A100 40GB, A100 80GB, A30",
    (9, 0): "H100 80GB, H100 NVL, GH200 96GB, H200", (10, 0): "B200", (10, 3): "B300",
    (8, 6): "A2, A10, A10G, A16, A40, RTX A2000 6GB, RTX A2000 12GB, RTX A4000, RTX A4500, RTX A5000, RTX A5500, "
    "RTX A6000", (8, 9): "L4, L40, L40S", (12, 0): "RTX PRO 6000 Blackwell",
}  # fmt: skip
"""By NVIDIA's list of compute capabilities (developer.nvidia.com/cuda-gpus); GeForce RTX is by its series."""
SERIES = {"20": (7, 5), "30": (8, 6), "40": (8, 9), "50": (12, 0)}


def test_a_cards_capability_is_that_of_its_generation():
    for entry in (entry for entry in OF_A_MAKER if entry.platform == "CUDA"):
        number = re.match(r"GeForce RTX (\d\d)", entry.name)
        if number:
            assert entry.capability == SERIES[number[1]], entry.name
        elif entry.name.endswith(" Ada"):
            assert entry.capability == (8, 9), entry.name
        else:
            assert entry.name in GENERATIONS[entry.capability].split(", ")


def test_only_the_memory_is_known_where_cuda_does_not_run():
    for name, platform in [("mi300x", "ROCm"), ("m2 16gb", "MPS")]:
        entry = card(name)
        assert entry.platform == platform and entry.capability == card("a100").capability
        assert entry.kernels != card("a100").kernels
        assert entry.note is not None and platform in entry.note and "A100 40GB" in entry.note
    assert card("a100").note is None
    assert card("a100").kernels == card("a100-80gb").kernels != card("t4").kernels


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    [
        ((8, 0), None, 8_519_680),  # 2 · 4096 KiB + 8 · 16 KiB = 8,388,608 + 131,072
        ((7, 5), "2.13.0", 8_519_680),
        ((9, 0), "2.11.0", 32 * MiB),
        ((10, 0), "2.11.0", 8_519_680),  # Blackwell has the large workspace since 2.12
        ((10, 0), "2.12.0+cu130", 32 * MiB),
        ((12, 0), "2.14.0", 32 * MiB),
        ((10, 0), None, 32 * MiB),  # the release that is assumed is a current one
        ((10, 3), "2.11.9", 8_519_680),
        ((9, 1), "2.11.0", 8_519_680),  # Hopper is 9.0
        ((9, 0), "1.13.1", 32 * MiB),
        ((8, 9), "2.14.0", 8_519_680),
        ((12, 0), "3.0.0", 32 * MiB),
    ],
)
def test_cublas_workspace(capability, version, expected):
    assert cublas_workspace(capability, torch_version=version) == expected


def test_cublas_workspace_config():
    assert cublas_workspace((9, 0), config=":4096:8") == 8 * 4096 * KiB
    assert cublas_workspace((9, 0), config=":16:8") == 128 * KiB
    assert cublas_workspace((9, 0), config=":4096:2:16:8") == 8_519_680
    assert cublas_workspace((9, 0), config="nonsense") == 32 * MiB
    assert cublas_workspace((9, 0), config=":0:0") == 0


def test_cublaslt_workspace():
    assert cublaslt_workspace("2.11.0") == cublaslt_workspace("2.11.9+cu128") == MiB
    assert cublaslt_workspace("2.12.0") == 0  # shared with cuBLAS since then
    assert cublaslt_workspace("2.13.0") == cublaslt_workspace() == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.13.0+cpu", (2, 13)), ("2.9", (2, 9)), ("10.2.1", (10, 2)), (None, (2, 14)), ("main", (2, 14)), ("", (2, 14))],
)
def test_the_release_of_a_version(text, expected):
    assert torch_release(text) == expected


def test_the_package_needs_neither_torch_nor_numpy():
    code = "import sys, memsize.device.gpu_estimate; print({'torch', 'numpy', 'pandas', 'click'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
