"""Multiply-adds: held against PyTorch's own counter, torchinfo and arithmetic, and chosen as columns."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
import torchinfo
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import memsize
from memsize import Report
from memsize.errors import UnknownValueError
from memsize.render import render
from tests.conftest import Python
from tests.models import Toy
from tests.records import column_keys, totals, visible


def counted(model: nn.Module, *size: int, batch: int = 1, mode: str = "train") -> int:
    report = memsize.report(model, size, batch_size=batch, scenarios="as-given", mode=mode)
    found = report.totals.multiply_adds
    assert found is not None
    return found


def by_pytorch(model: nn.Module, *size: int) -> int:
    """What PyTorch's counter says of a real forward, in multiply-adds."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.eval()(torch.zeros(1, *size))
    return int(counter.get_total_flops()) // 2


def by_torchinfo(model: nn.Module, *size: int, batch: int = 1) -> int:
    return int(torchinfo.summary(model, (batch, *size), verbose=0, device="cpu").total_mult_adds)


def test_the_toy_in_arithmetic() -> None:
    layers = memsize.report(Toy(), (3, 64, 64), batch_size=2, scenarios="as-given").layers.set_index("path")
    assert layers["multiply_adds"].to_dict() == {
        "": 0,
        "conv": 0,
        "conv.0": 2 * (300 * 3 * 9) * 62 * 62,
        "conv.1": 2 * (500 * 300 * 9) * 60 * 60,
        "conv.2": 2 * (1000 * 500 * 9) * 58 * 58,
        "fc": 2 * 3_364_000,
    }
    assert layers.loc["conv.1", "kernel"] == "3×3"
    assert layers.loc["conv.1", "input"] == "float32[2,300,62,62]"


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050", "vit_tiny_patch16_224"])
def test_networks_agree_with_pytorch(name: str) -> None:
    model = timm.create_model(name)
    size = (3, 224, 224) if name.startswith("vit") else (3, 64, 64)
    # PyTorch's counter has no formula for the CPU's op of attention.
    attention = 12 * 2 * 197 * 197 * 192 if name.startswith("vit") else 0
    assert counted(model, *size, mode="eval") == by_pytorch(model, *size) + attention


def test_torchinfo_counts_biases_too() -> None:
    """It multiplies all of a convolution's parameters by its positions, the bias included."""
    biases = 300 * 62 * 62 + 500 * 60 * 60 + 1000 * 58 * 58 + 1
    assert by_torchinfo(Toy(), 3, 64, 64) == counted(Toy(), 3, 64, 64) + biases


def test_torchinfo_counts_norms_too() -> None:
    """The parameters of a normalization count once for each sample there, and not here."""
    plain = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3, bias=False))
    normed = nn.Sequential(plain[0], nn.BatchNorm2d(8), plain[1])
    ours = counted(plain, 3, 8, 8, batch=4)
    assert ours == by_torchinfo(plain, 3, 8, 8, batch=4) == 4 * (8 * 3 * 9 * 6 * 6 + 8 * 8 * 9 * 4 * 4)
    assert counted(normed, 3, 8, 8, batch=4) == ours
    assert by_torchinfo(normed, 3, 8, 8, batch=4) == ours + 4 * 16


def test_a_linear_layer_runs_for_each_token() -> None:
    """torchinfo counts one application for each sample, however long the sequence is."""
    layer = nn.Linear(16, 32, bias=False)
    assert counted(layer, 10, 16, batch=2) == 2 * 10 * 16 * 32
    assert by_torchinfo(layer, 10, 16, batch=2) == 2 * 16 * 32


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_agree_with_torchinfo(kind: type[nn.LSTM | nn.GRU]) -> None:
    layer = kind(12, 20, num_layers=2, bidirectional=True, bias=False, batch_first=True)
    gates = 4 if kind is nn.LSTM else 3
    expected = 3 * 7 * 2 * gates * 20 * ((12 + 20) + (2 * 20 + 20))
    assert counted(layer, 7, 12, batch=3) == by_torchinfo(layer, 7, 12, batch=3) == expected


class GroupedAttention(nn.Module):
    """Attention whose 8 heads of queries share 2 heads of keys and values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = x[:, :2]
        return nn.functional.scaled_dot_product_attention(x, keys, keys, is_causal=True, enable_gqa=True)


def test_attention_counts_every_head_of_the_query_and_no_mask() -> None:
    expected = 3 * 8 * (16 * 16 * 64) * 2
    assert counted(GroupedAttention().half(), 8, 16, 64, batch=3) == expected


class Experts(nn.Module):
    """Two experts, each a matrix, of which each token meets one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 32, 64, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x.bfloat16(), self.weight, torch.tensor([4, 10], dtype=torch.int32))


def test_experts_count_the_tokens_that_they_are_given() -> None:
    assert counted(Experts(), 32, batch=10) == 10 * 32 * 64


def test_a_step_counts_its_first_forward() -> None:
    """A training step's table is that of its first forward: no backward and no later step is in it."""
    step = memsize.trace(Toy(), (3, 64, 64), optimizer="sgd")
    assert totals(step.trace).multiply_adds == counted(Toy(), 3, 64, 64)


def test_rows_add_up_at_every_depth() -> None:
    trace = memsize.report(timm.create_model("resnet18"), (3, 64, 64), batch_size=2, scenarios="as-given").trace
    for depth in (0, 1, 2, None):
        assert sum(row.multiply_adds or 0 for row in visible(trace, depth)) == totals(trace).multiply_adds


# Unknown is not zero.


def test_without_a_run_nothing_is_known() -> None:
    report = memsize.report(Toy())
    assert report.totals.multiply_adds is None and report.layers["multiply_adds"].isna().all()


def test_a_run_of_an_older_version_knows_nothing_of_them() -> None:
    report = memsize.load(Path(__file__).parent / "saved" / "report.1.memsize")
    assert isinstance(report, Report) and report.totals.multiply_adds is None


# Columns to choose.


def test_torchinfos_names_of_columns_are_understood() -> None:
    chosen = ("kernel_size", "input_size", "output_size", "num_params", "params_percent", "mult_adds", "trainable")
    assert column_keys(chosen) == ("kernel", "input", "output", "parameters", "share", "mult_adds", "trainable")
    with pytest.raises(UnknownValueError, match="mult_ads"):
        column_keys(["mult_ads"])


@pytest.fixture(scope="module")
def toy() -> Report:
    return memsize.report(Toy(), (3, 64, 64), scenarios="as-given")


def test_only_pages_hold_columns_that_nobody_asked_for(toy: Report) -> None:
    assert all("multiply-adds" not in render(toy, form) for form in ("text", "markdown", "notebook"))
    page = render(toy, "html")
    assert 'data-key="mult_adds"' in page and ">20,032,500,400<" in page
    assert page.count('data-key="mult_adds" data-kind="count" title') == 1
    shown = render(toy, "html", columns=("mult_adds",))
    assert " hidden>" in page and " hidden>" not in shown[shown.index("<main") :]


def test_chosen_columns_have_their_totals(toy: Report) -> None:
    text = render(toy, "text", columns=["params_percent", "mult_adds", "mult_adds_share"])
    line = next(line for line in text.splitlines() if line.startswith("total"))
    assert line.split() == ["total", "100%", "20,032,500,400", "100%"]


def test_formulas_are_read_without_importing_triton(python: Python, tmp_path: Path) -> None:
    kernels = tmp_path / "triton" / "runtime" / "jit.py"
    kernels.parent.mkdir(parents=True)
    for package in kernels.parents[:2]:  # before one that is installed
        (package / "__init__.py").touch()
    kernels.write_text("class JITFunction: pass")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import memsize.kernels.multiply_adds
from torch.utils.flop_counter import flop_registry, register_flop_formula
print("triton" in sys.modules)
from triton.runtime.jit import JITFunction
kernel = JITFunction()
register_flop_formula(kernel)(lambda *_, **__: 7)
print(flop_registry[kernel]())
"""
    done = python("-c", program)
    assert done.stdout.split() == ["False", "7"], done.stderr
