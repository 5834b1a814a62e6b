"""The memory-format audit: formats beside a real run's, ops that are known to lose channels last, copies in bytes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memsize
from memsize import LayoutReport, layout
from memsize.cli import run
from memsize.documents import document
from memsize.documents.sections import Findings, Table, Verdict
from memsize.errors import ForwardError, OutputError
from memsize.records.trace import InputTensor, TensorSpec
from memsize.render import FORMATS, render
from tests.pages import check_golden as check
from tests.records import Audit, Copy, Format, LayerFormats, Loss, Run
from tests.rules import LAYOUT_RULES

Write = Callable[[str, str], Path]

IMAGE = 8 * 16 * 16 * 4
"""Bytes of one float32 image of 8 channels and 16 × 16 pixels."""


class Body(nn.Module):
    """A 3×3 convolution to 8 channels, what is under test, and another 3×3 convolution."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 8, 3, padding=1)
        self.middle = middle
        self.tail = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.middle(self.head(x)))


class Kept(nn.Module):
    """Ops that keep the format, on the CPU as on CUDA: norm, activation, pooling, sums, cat, slices, resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.point = nn.Conv2d(16, 4, 1)
        self.pool = nn.MaxPool2d(2)
        self.mean = nn.AvgPool2d(2)
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm(self.conv(x)))
        z = self.deep(y) + y
        w = self.point(torch.cat((y, z), 1))
        return self.up(self.mean(self.gate(self.pool(w)) * 2)[:, 1:])


class ChannelNorm(nn.Module):
    """ConvNeXt's way: a LayerNorm over the channels, between two permutations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def shuffled(x: Tensor) -> Tensor:
    """ShuffleNet's channel shuffle in two groups."""
    batch, channels, height, width = x.shape
    return x.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous().view(x.shape)


def audit(model: nn.Module, *size: int, batch: int = 1, scenario: str = "as-given") -> LayoutReport:
    return layout(model, size or (3, 16, 16), batch_size=batch, scenario=scenario)


def codes(report: LayoutReport) -> set[str]:
    return {finding.code for finding in report.findings}


def losses(report: LayoutReport) -> list[tuple[str, str]]:
    return [(loss.layer, loss.op) for loss in report.audit.last.losses]


def copies(report: LayoutReport) -> list[tuple[str, str, int]]:
    return [(copy.layer, copy.op, copy.bytes) for copy in report.audit.last.copies]


# Formats beside those of a real run


def format_of(image: Tensor) -> str | None:
    """The memory format by PyTorch's own checks."""
    if image.dim() != 4:
        return None
    last = image.is_contiguous(memory_format=torch.channels_last)
    if image.is_contiguous():
        return "either" if last else "row-major"
    return "channels last" if last else "other"


def real_formats(model: nn.Module, x: Tensor) -> dict[str, list[str | None]]:
    """The formats that each module of `model` really returns on the CPU in channels last."""
    found: dict[str, list[str | None]] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _m, _i, out, name=name: found.setdefault(name, []).append(format_of(out)))
    model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    return found


@pytest.mark.parametrize("make", [Kept, lambda: Body(ChannelNorm()), lambda: Body(torch.relu), lambda: Body(shuffled)])
def test_formats_are_those_of_a_real_run(make: Callable[[], nn.Module]) -> None:
    report = audit(make())
    real = real_formats(make(), torch.rand(1, 3, 16, 16))
    assert {layer.path: list(layer.outputs) for layer in report.audit.last.layers} == real


def test_what_keeps_the_format_copies_nothing() -> None:
    report = audit(Kept())
    assert losses(report) == [] and copies(report) == []
    assert report.audit.last.copied == 0
    # The weights of three convolutions, and the input.
    assert (report.audit.converted, report.audit.converted_inputs) == (3, 1)
    assert codes(report) == {"channels-last-kept"}


def test_volumes_have_a_format_of_their_own() -> None:
    model = nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2))
    report = audit(model, 3, 8, 16, 16)
    assert [layer.outputs for layer in report.audit.last.layers] == [("channels last",)] * 5
    assert losses(report) == [] and report.audit.converted == 1


# Ops that lose it


def test_a_copy_to_row_major_is_copied_back_by_the_next_convolution() -> None:
    report = audit(Body(lambda x: x.contiguous()))
    assert losses(report) == [("", "clone")]
    assert copies(report) == [("", "clone", IMAGE), ("tail", "convolution", IMAGE)]
    assert report.audit.plain.copied == 0
    assert codes(report) == {"channels-last-copies-more", "format-lost", "convolution-copies-back"}
    # The tail's weight is channels last, so what it returns is again.
    assert {layer.path: layer.outputs for layer in report.audit.last.layers}["tail"] == ("channels last",)
    hidden = {copy.op: copy.hidden for copy in report.audit.last.copies}
    assert hidden == {"clone": False, "convolution": True}


def test_the_line_that_asked_for_it_is_named() -> None:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith(".contiguous().view(x.shape)"))
    assert [loss.place for loss in audit(Body(shuffled)).audit.last.losses] == [f"test_layout.py:{number}"]


def test_a_channel_shuffle_is_a_copy_in_either_format() -> None:
    report = audit(Body(shuffled))
    assert losses(report) == [("", "clone")]
    # Row-major copies the shuffle too; channels last also copies its result back.
    assert (report.audit.plain.copied, report.audit.last.copied) == (IMAGE, 2 * IMAGE)


def test_a_one_by_one_convolution_brings_the_format_back() -> None:
    class Back(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(3, 8, 3, padding=1)
            self.tail = nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.tail(self.head(x).contiguous())

    # The tail's weight lies the same either way; its strides say channels last, and cuDNN goes by them.
    report = audit(Back())
    assert copies(report) == [("", "clone", IMAGE), ("tail", "convolution", IMAGE)]
    assert real_formats(Back(), torch.rand(1, 3, 16, 16))["tail"] == ["channels last"]
    assert report.audit.last.layers[2].outputs == ("channels last",)


def test_a_stack_is_row_major() -> None:
    report = audit(Body(lambda x: torch.stack((x, x), 1).sum(1)))
    assert losses(report) == [("", "stack")]
    assert copies(report) == [("tail", "convolution", IMAGE)]
    assert "channels-last-kept" not in codes(report)


def test_flatten_is_a_copy() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 256, 2))
    report = audit(model, batch=4)
    assert losses(report) == [("1", "clone")]
    assert copies(report) == [("1", "clone", 4 * IMAGE)]


def test_flatten_of_single_pixels_is_none() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    assert copies(audit(model)) == []


def test_permuted_channels_are_views() -> None:
    report = audit(Body(ChannelNorm()))
    assert losses(report) == []
    # In row-major, CUDA's layer norm makes what it is given contiguous, and the tail's input is permuted back to
    # channels last strides, which cuDNN follows: it rearranges the tail's 8·8·3·3 weights.
    assert [(c.layer, c.op, c.bytes) for c in report.audit.plain.copies] == [
        ("middle.norm", "native_layer_norm", IMAGE),
        ("tail", "convolution", 8 * 8 * 9 * 4),
    ]
    assert report.audit.last.copied == 0
    assert "channels-last-copies-less" in codes(report)


def test_a_permutation_that_channels_last_makes_free() -> None:
    report = audit(Body(lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)))
    assert losses(report) == [] and report.audit.last.copied == 0
    assert report.audit.plain.copied == IMAGE + 8 * 8 * 9 * 4


def native_group_norm_copies() -> bool:
    """Whether group norm makes its input contiguous in its kernel, as since PyTorch 2.14, or before it."""
    return tuple(map(int, str(torch.__version__).split(".")[:2])) >= (2, 14)


@pytest.mark.parametrize(
    ("middle", "op"),
    [
        (nn.LayerNorm((8, 16, 16)), "native_layer_norm"),
        (nn.Softmax(1), "_softmax"),
        (nn.LogSoftmax(1), "_log_softmax"),
        (nn.ReflectionPad2d(0), "reflection_pad2d"),
        (nn.GroupNorm(2, 8), "native_group_norm" if native_group_norm_copies() else "clone"),
    ],
)
def test_kernels_that_are_row_major(middle: nn.Module, op: str) -> None:
    report = audit(Body(middle))
    assert losses(report) == [("middle", op)]
    assert copies(report) == [("middle", op, IMAGE), ("tail", "convolution", IMAGE)]
    assert ("kernel-copies" in codes(report)) == (op != "clone")


def test_cat_of_two_formats_is_row_major() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return torch.cat((y.contiguous(), y), 1)

    assert losses(audit(Mixed())) == [("", "clone"), ("", "cat")]


def test_float64_has_no_channels_last() -> None:
    report = audit(Body(torch.relu).double())
    assert {op for _, op in losses(report)} == {"convolution"}
    # The head is given 3·16·16 doubles and 8·3·9 weights, the tail row-major images and 8·8·9 weights.
    sizes = [3 * 256 * 8, 8 * 3 * 9 * 8, 8 * 8 * 9 * 8]
    assert [size for _, _, size in copies(report)] == sizes
    assert "float64-convolutions" in codes(report)


def test_a_model_without_images() -> None:
    report = audit(nn.Linear(8, 2), 8)
    assert codes(report) == {"nothing-to-convert"}
    assert "changes nothing" in str(report) and "Memory formats" not in str(report)


def test_autocast_keeps_the_format_of_what_it_casts() -> None:
    report = audit(Kept(), scenario="amp-bf16")
    assert losses(report) == [] and copies(report) == []


# What it leaves alone, and how it is shown


def test_the_model_and_its_input_stay_as_they_are() -> None:
    model, x = Kept(), torch.rand(2, 3, 16, 16)
    layout(model, input_data=x)
    assert x.is_contiguous() and all(p.is_contiguous() for p in model.parameters())
    assert not any(p.is_meta for p in model.parameters())
    assert int(model.norm.num_batches_tracked) == 0


def test_real_inputs_are_run_in_the_batch_that_they_have() -> None:
    found = layout(nn.Conv2d(3, 8, 3), input_data=torch.zeros(4, 3, 8, 8)).audit
    assert [str(tensor.spec) for tensor in found.inputs] == ["float32[4,3,8,8]"]


class Conditioned(nn.Module):
    """An image to which the embeddings of a class and of a step are added."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.classes, self.steps = nn.Conv2d(3, 8, 3, padding=1), nn.Embedding(10, 8), nn.Embedding(100, 8)

    def forward(self, image: Tensor, label: Tensor, step: Tensor) -> Tensor:
        return self.conv(image) + (self.classes(label) + self.steps(step)).sum(1)[:, :, None, None]


def test_an_embedding_looks_up_integers() -> None:
    report = layout(Conditioned(), ((3, 16, 16), "label=1", "step=2"), batch_size=2)
    assert [tensor.spec.dtype for tensor in report.audit.inputs] == ["float32", "int64", "int64"]
    assert "label, step: int64, as nn.Embedding needs" in report.notes
    assert report.audit.last.layers[1].outputs == ("channels last",)


def test_a_failing_forward_says_where() -> None:
    with pytest.raises(ForwardError, match="tail"):
        audit(Body(lambda x: x[:, :4]))


def test_rows_add_up_to_the_total_at_every_depth() -> None:
    inner = Body(lambda x: x.contiguous())
    model = nn.Sequential(nn.Sequential(inner, nn.ReLU()), nn.Conv2d(8, 3, 3))
    report = audit(model)
    for depth in (None, 0, 1, 2, 3):
        table = next(part for part in document(report, depth=depth).sections() if isinstance(part, Table))
        for column in (-1, -2):
            assert sum(row[column] for row in table.rows) == table.total[column]
    assert report.layers["copied_bytes"].sum() == report.audit.last.copied == 2 * IMAGE
    assert report.copies["bytes"].sum() == 2 * IMAGE


def test_each_format_of_the_report() -> None:
    report = audit(Body(lambda x: x.contiguous()))
    found = json.loads(report.to_json())
    assert found["schema"] == "memsize.layout/1"
    assert found["copied_bytes"] == 2 * IMAGE == sum(copy["bytes"] for copy in found["copies"])
    assert [loss["op"] for loss in found["losses"]] == ["clone"]
    rows = list(csv.DictReader(io.StringIO(render(report, "csv"))))
    assert [row["path"] for row in rows] == ["", "head", "tail"]
    assert sum(int(row["copied_bytes"]) for row in rows) == 2 * IMAGE
    for form in ("text", "markdown", "html"):
        assert "convolution" in render(report, form) and "channels last" in render(report, form)
    assert "channels last" in report._repr_html_()
    assert any(isinstance(part, Findings | Verdict) for part in document(report).sections())
    assert "Channels last is lost in" in str(report.why())
    with pytest.raises(OutputError):
        render(report, "pdf")


def made_by_hand() -> LayoutReport:
    """A net whose second layer loses channels last by a clone, so that the third copies it back in its kernel."""
    image = TensorSpec("float32", (1, 8, 16, 16))
    last: tuple[Format, ...] = ("channels last",)
    rows: tuple[Format, ...] = ("row-major",)
    layers = (
        LayerFormats("", "Net", 0, False, 1, (), last, last, (TensorSpec("float32", (1, 10)),)),
        LayerFormats("stem", "Conv2d", 1, True, 1, last, last, last, (image,)),
        LayerFormats("blocks", "Sequential", 1, False, 1, (), last, last, (image,)),
        LayerFormats("blocks.0", "Shuffle", 2, True, 2, (), last, rows, (image, image)),
        LayerFormats("blocks.1", "Conv2d", 2, True, 1, last, rows, last, (image,)),
        LayerFormats("fc", "Linear", 1, True, 1, (), (), (), (TensorSpec("float32", (1, 10)),)),
    )
    clone = Copy("blocks.0", "clone", image, "channels last", "row-major", IMAGE, False, "net.py:7")
    back = Copy("blocks.1", "convolution", image, "row-major", "channels last", IMAGE, True)
    audit = Audit(
        model="net.py:Net",
        inputs=(InputTensor("image", TensorSpec("float32", (1, 3, 16, 16)), 3072),),
        scenario="fp32",
        training=True,
        plain=Run(layers, (Copy("", "clone", image, "other", "row-major", IMAGE, False),), ()),
        last=Run(layers, (clone, back), (Loss("blocks.0", "clone", image, "row-major", "net.py:7"),)),
        converted=2,
        converted_inputs=1,
    )
    return LayoutReport(audit, ("a note with <markup> | in it",), LAYOUT_RULES.findings(audit))


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "markdown"])
def test_golden(format: str) -> None:
    check(f"layout{FORMATS[format][0]}", render(made_by_hand(), format))


def test_golden_at_a_terminals_width() -> None:
    check("layout.80.txt", render(made_by_hand(), "text", width=80, depth=1))


def test_json_to_a_file(tmp_path: Path) -> None:
    report = audit(Kept())
    text = report.to_json(tmp_path / "layout.json")
    assert (tmp_path / "layout.json").read_text(encoding="utf-8") == text


def test_the_command(write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(
        "net.py",
        """
        from torch import nn

        class Net(nn.Module):
            def __init__(self, width=8):
                super().__init__()
                self.conv = nn.Conv2d(3, width, 3)

            def forward(self, x):
                return self.conv(x).contiguous()
        """.replace("\n        ", "\n"),
    )
    monkeypatch.chdir(file.parent)
    assert run(["layout", "net.py", "--input", "3,16,16", "--arg", "width=4", "-b", "2"]) == 0
    out, err = capsys.readouterr()
    # 2 images of 4 channels, 14 × 14: 2·4·196·4 = 6,272 B
    assert "lost in the model itself at net.py:10" in out and "6.12 KiB" in out
    assert err == ""
    assert run(["layout", "net.py", "--input", "3,16,16", "-f", "json", "--scenario", "amp-fp16"]) == 0
    assert json.loads(capsys.readouterr().out)["scenario"] == "amp-fp16"
    assert run(["layout", "net.py", "--input", "3,16,16", "--scenario", "fp17"]) == 2
    assert "fp17" in capsys.readouterr().err


# In peaks


class Permuted(nn.Module):
    """Layer norm over the channels of an image, as ConvNeXt has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1))


def test_what_a_kernel_rearranges_is_part_of_the_peak() -> None:
    step = memsize.trace(Permuted(), (32, 16, 16), optimizer=None)
    image = 32 * 16 * 16 * 4
    # the input, its row-major copy and the output, the mean and the deviation of 256 rows, weight and bias
    assert step.peak.requested == 3 * image + 2 * 256 * 4 + 2 * 32 * 4
    assert step.peak.roles["temporary"] >= image


def test_contiguous_arguments_are_not_copied() -> None:
    step = memsize.trace(nn.LayerNorm(32), (16, 16, 32), optimizer=None)
    assert step.peak.requested == 2 * 32 * 16 * 16 * 4 + 2 * 256 * 4 + 2 * 32 * 4
