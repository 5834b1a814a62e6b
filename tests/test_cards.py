"""Cards, library workspaces and the context: names, sizes, and the arithmetic behind them."""

import subprocess
import sys

import pytest

from memsize.device import card, context, cublas_workspace, cublaslt_workspace, cudnn_workspace
from memsize.device.cards import CARDS
from memsize.device.context import EAGER, LAZY
from memsize.device.workspace import keeps_workspace
from memsize.errors import InputError

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
    ],
)
def test_names(name, found):
    assert card(name).name == found


def test_an_unknown_card_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="no GPU 'RTX 4091' in the table: did you mean GeForce RTX 4090"):
        card("RTX 4091")
    with pytest.raises(InputError, match="known: Tesla V100 16GB"):
        card("?")


def test_every_name_and_alias_means_one_card():
    names = [name for entry in CARDS.values() for name in (entry.name, *entry.aliases)]
    assert [card(name).name for name in names] == [
        entry.name for entry in CARDS.values() for _ in (entry.name, *entry.aliases)
    ]


@pytest.mark.parametrize("entry", CARDS.values(), ids=lambda entry: entry.name)
def test_a_process_gets_less_than_what_is_printed_on_the_box(entry):
    assert entry.source
    assert 0.89 * _nominal(entry.name) < entry.bytes / 1e9 < 1.08 * _nominal(entry.name)


def _nominal(name):
    """The gigabytes that the maker names."""
    sizes = {
        "Tesla T4": 16, "GeForce RTX 2080 Ti": 11, "A30": 24, "A10": 24, "A10G": 24, "GeForce RTX 3070": 8,
        "GeForce RTX 3090": 24, "RTX A4000": 16, "RTX A6000": 48, "L4": 24, "L40": 48, "L40S": 48, "RTX 6000 Ada": 48,
        "GeForce RTX 4060": 8, "GeForce RTX 4090": 24, "H100 NVL": 94, "H200": 141, "B200": 180, "B300": 288,
        "GeForce RTX 5090": 32,
    }  # fmt: skip
    return sizes.get(name) or int(name.split()[-1].removesuffix("GB"))


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    [
        ((8, 0), None, 8_519_680),  # 2 · 4096 KiB + 8 · 16 KiB = 8,388,608 + 131,072
        ((7, 5), "2.13.0", 8_519_680),
        ((9, 0), "2.11.0", 32 * MiB),
        ((10, 0), "2.11.0", 8_519_680),  # Blackwell has the large workspace since 2.12
        ((10, 0), "2.12.0+cu130", 32 * MiB),
        ((12, 0), "2.14.0", 32 * MiB),
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
    assert cublaslt_workspace(torch_version="2.11.0") == MiB
    assert cublaslt_workspace(torch_version="2.13.0") == 0
    assert cublaslt_workspace(torch_version="2.13.0", unified="0") == MiB
    assert cublaslt_workspace(torch_version="2.13.0", unified="0", size="4096") == 4 * MiB
    assert cublaslt_workspace(torch_version="2.11.0", unified="1") == 0


def test_workspaces_are_kept_up_to_2_14():
    assert keeps_workspace()
    assert keeps_workspace("2.14.1")
    assert not keeps_workspace("2.15.0")
    assert keeps_workspace("2.15.0", cache="1")


def test_cudnn_workspace_is_an_interval():
    assert cudnn_workspace(10 * MiB) == (0, 10 * MiB)
    assert cudnn_workspace(10 * MiB, benchmark=True) == (0, 30 * MiB)


def test_context():
    assert context() == context("12.8") == context("11.7") == LAZY.context == (300 * MiB, 650 * MiB)
    assert context("11.6") == context("10") == EAGER.context
    assert context("12.8", module_loading="eager") == EAGER.context
    assert context().plus(GiB) == (GiB + 300 * MiB, GiB + 650 * MiB)
    with pytest.raises(InputError, match="cannot read 'new' as a CUDA version"):
        context("new")


def test_the_package_needs_neither_torch_nor_numpy():
    code = "import sys, memsize.device; print({'torch', 'numpy', 'pandas', 'click'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
