"""The report from end to end: the figures of the question, the structural cases, and what torchinfo says of them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
import torchinfo
from torch import nn

import memsize
from benchmarks.resnet import ResNet50
from memsize import Finding, Report
from memsize.render import render
from tests import models
from tests.records import ScenarioResult, Totals

# Toy CNN, batch 1, 3×64×64.
PARAMETERS = 300 * (3 * 9 + 1) + 500 * (300 * 9 + 1) + 1000 * (500 * 9 + 1) + 3364000 + 1
OUTPUTS = 300 * 62 * 62 + 500 * 60 * 60 + 1000 * 58 * 58 + 1
INPUT = 3 * 64 * 64


def without_memory(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


@pytest.fixture(scope="module")
def toy() -> Report:
    return memsize.report(without_memory(models.Toy), (3, 64, 64), scenarios="all")


def scenario(report: Report, name: str) -> ScenarioResult:
    return next(result for result in report.scenario_results if result.name == name)


def figures(report: Report, name: str) -> Totals:
    found = scenario(report, name).totals
    assert found is not None
    return found


def test_the_arithmetic_of_the_toy() -> None:
    assert (PARAMETERS, OUTPUTS, INPUT) == (9_223_901, 6_317_201, 12_288)


def test_fp32(toy: Report) -> None:
    fp32 = figures(toy, "fp32")
    assert fp32.parameters == PARAMETERS
    assert fp32.parameter_bytes == 4 * PARAMETERS == 36_895_604
    assert fp32.output_bytes == 4 * OUTPUTS == 25_268_804
    # Every output but the last one's four bytes is the next layer's input and kept, and so is the model's input.
    assert fp32.saved_bytes == 4 * (OUTPUTS - 1 + INPUT) == 25_317_952
    assert fp32.training == 36_895_604 + 25_317_952


@pytest.mark.parametrize("name", ["fp16", "bf16", "apex-O3"])
def test_halves(toy: Report, name: str) -> None:
    half = figures(toy, name)
    assert half.parameter_bytes == 2 * PARAMETERS == 18_447_802
    assert half.saved_bytes == 2 * (OUTPUTS - 1 + INPUT)


def test_half_outputs(toy: Report) -> None:
    assert figures(toy, "fp16").output_bytes == 2 * OUTPUTS == 25_268_804 // 2


@pytest.mark.parametrize("name", ["amp-fp16", "amp-bf16", "apex-O1"])
def test_autocast_casts_no_parameter_and_keeps_copies(toy: Report, name: str) -> None:
    amp = figures(toy, name)
    assert amp.parameter_bytes == 36_895_604
    assert amp.cast_bytes == 2 * PARAMETERS == 18_447_802
    # Biases (1,801 elements) are cast but not kept for backward.
    assert amp.saved_cast_bytes == 2 * (PARAMETERS - 1_801) == 18_444_200
    assert amp.saved_bytes == 2 * (OUTPUTS - 1 + INPUT) + 18_444_200 == 31_103_176


def test_apex_o2_holds_master_weights(toy: Report) -> None:
    o2 = figures(toy, "apex-O2")
    assert (o2.parameter_bytes, o2.master_bytes) == (18_447_802, 36_895_604)


def test_int8_weight_only(toy: Report) -> None:
    # Only the Linear: 3,364,000 int8, one float32 scale and one int8 zero point; its bias and the rest stay float32.
    linear = 3_364_000 + 4 + 1
    assert figures(toy, "int8-weight").parameter_bytes == 4 * (PARAMETERS - 3_364_000) + linear == 26_803_609


def test_a_scenario_that_does_not_apply_says_why_and_the_others_run(toy: Report) -> None:
    int4 = scenario(toy, "int4-weight")
    assert int4.status == "unavailable"
    assert "3364000" in str(int4.reason)
    assert [result.status for result in toy.scenario_results].count("run") >= 13


def test_the_crossover_is_at_batch_two(toy: Report) -> None:
    found = {finding.code: finding for finding in toy.why()}
    assert found["amp-crossover"].values["batch"] == 2
    # Just as the runs say: 31,103,176 > 25,317,952 at one, 18,444,200 + 2·12,658,976 < 2·25,317,952 at two.
    two = memsize.report(without_memory(models.Toy), (3, 64, 64), batch_size=2, scenarios="fp32,amp-bf16")
    assert figures(two, "amp-bf16").saved_bytes == 43_762_152 < figures(two, "fp32").saved_bytes == 50_635_904


def test_findings_of_the_toy(toy: Report) -> None:
    codes = [finding.code for finding in toy.why()]
    assert codes[:3] == ["summary-assumes-4-bytes", "amp-keeps-fp32-parameters", "amp-crossover"]
    assert {"activations-dominate", "quantization-leaves-layers"} <= set(codes)
    unpacked = [finding for finding in toy.why() if finding.code == "quantized-weights-unpacked"]
    assert unpacked[0].bytes == 4 * 3_364_000 and unpacked[0].layers == ("fc",)
    text = repr(toy.why())
    assert "35.19" in text
    assert "17.59 MiB" in text
    assert "torchinfo" in text
    assert "36.90 MB" in text


class Tied(nn.Module):
    """64 rows of 32 that are embedding and output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def test_a_quantization_that_parts_tied_weights_says_that_the_model_grows() -> None:
    report = memsize.report(Tied(), "8:int64", scenarios="fp32,int8-weight")
    (finding,) = (finding for finding in report.why() if finding.code == "quantization-unties")
    # A byte for each weight, and for each row a scale in four bytes and a zero point in one.
    copy = 64 * 32 + 64 * (4 + 1)
    grown = figures(report, "int8-weight").parameter_bytes - figures(report, "fp32").parameter_bytes
    assert finding.bytes == grown == copy
    assert finding.text() == (
        "int8-weight stores head.weight a second time, 2.31 KiB: embed.weight, to which it was tied, stays as it is."
    )
    (leaves,) = (finding for finding in report.why() if finding.code == "quantization-leaves-layers")
    assert "int8-weight stores head in 2.31 KiB and leaves" in leaves.text()
    own = Tied()
    own.head.weight = nn.Parameter(own.embed.weight.detach().clone())
    codes = [finding.code for finding in memsize.report(own, "8:int64", scenarios="fp32,int8-weight").why()]
    assert "quantization-unties" not in codes


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_report_says_why_a_gpu_keeps_the_scores_of_bfloat16() -> None:
    def unfused(gpu: str | None) -> list[Finding]:
        report = memsize.report(Attention(), (128, 64), batch_size=2, gpu=gpu, train="sgd", scenarios="fp16,bf16")
        return [finding for finding in report.why() if finding.code == "unfused-attention"]

    (finding,) = unfused("t4")
    # 4 heads of 128 × 128 for each of two samples, which PyTorch computes in float32.
    assert finding.bytes == 2 * 4 * 128 * 128 * 4
    assert finding.text() == (
        "Under bf16, 0.50 MiB kept for backward are attention scores: no fused kernel supports bfloat16 on this GPU; "
        "float16 has one."
    )
    assert not unfused("a100") and not unfused(None)
    fit = memsize.fit(Attention(), (128, 64), gpu="t4", train="sgd", scenarios="fp16,bf16")
    (finding,) = (finding for finding in fit.findings if finding.code == "unfused-attention")
    (next_size,) = (row.next_size for row in fit.fit_rows if row.scenario == "bf16")
    # In backward the scores are alive with two gradients of their size.
    assert next_size is not None and finding.bytes == 3 * next_size * 4 * 128 * 128 * 4
    assert finding.text().startswith("Under bf16, ") and "GiB at the limit are attention scores: " in finding.text()


def test_a_report_is_silent_on_scores_of_a_scenario_that_it_does_not_show() -> None:
    """Grouped heads have a fused kernel in bfloat16, none in float32, which only serves as the baseline here."""

    class Grouped(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            return nn.functional.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)

    def scenarios(asked: str) -> list[object]:
        report = memsize.report(Grouped(), (128, 64), gpu="a100", train="sgd", scenarios=asked)
        return [finding.values["names"] for finding in report.why() if finding.code == "unfused-attention"]

    assert (scenarios("bf16"), scenarios("fp32,bf16")) == ([], [("fp32",)])


def test_the_default_scenarios_leave_out_as_given_where_it_is_fp32() -> None:
    names = [r.name for r in memsize.report(models.Small(), (3, 32, 32), batch_size=2).scenario_results]
    assert names == ["fp32", "fp16", "bf16", "amp-fp16", "amp-bf16", "int8-weight"]
    half = memsize.report(models.Small().half(), (3, 32, 32), batch_size=2)
    assert half.scenario_results[0].name == "as-given"
    assert half.trace.inputs[0].spec.dtype == "float16"


@pytest.mark.parametrize(
    ("build", "size", "parameters", "parameter_bytes"),
    [
        (models.Tied, "16:int64", 68_160, 272_640),
        (models.Unused, (100,), 1_012_110, 4_048_440),
        (models.Reused, (16, 8, 8), 2_320, 9_280),
        (models.Attention, (7, 64), 16_965, 67_860),
        (models.Direct, (197, 768), 158_986, 635_944),
        (models.Listed, (100,), 1_010, 4_040),
        (models.Nested, (10,), 110, 440),
        (models.Recurrent, (5, 16), 14_947, 59_788),
        (models.Lazy, (20,), 210, 840),
    ],
)
def test_structural_cases(build: Callable[[], nn.Module], size: object, parameters: int, parameter_bytes: int) -> None:
    report = memsize.report(build(), size, scenarios="fp32")  # type: ignore[arg-type]
    assert (report.totals.parameters, report.totals.parameter_bytes) == (parameters, parameter_bytes)


def test_lazy_layers_are_quantized_as_what_they_become() -> None:
    report = memsize.report(models.Lazy(), (20,), scenarios="int8-weight")
    # 20·10 int8, a float32 scale and an int8 zero point for each of 10 rows, and the bias in float32.
    assert figures(report, "int8-weight").parameter_bytes == 200 + 10 * (4 + 1) + 40


def test_what_is_not_registered_is_shown_apart() -> None:
    report = memsize.report(models.Listed(), (100,))
    # Four times 100·100 + 100 elements: 41,410 are used, 1,010 registered.
    assert report.totals.attribute_bytes == 4 * 10_100 * 4
    assert "unregistered-tensors" in [finding.code for finding in report.why()]


def test_buffers_are_counted_and_shown_apart() -> None:
    report = memsize.report(models.Direct(), (197, 768), scenarios="fp32")
    assert report.totals.buffer_bytes == 2**20
    assert "buffers-count-too" in [finding.code for finding in report.why()]


ORDINARY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "toy": (models.Toy, (3, 64, 64)),
    "small": (models.Small, (3, 32, 32)),
    "perceptron": (lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), (64,)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)), (3, 9, 9)),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_torchinfo_agrees_on_ordinary_models(name: str) -> None:
    build, size = ORDINARY[name]
    report = memsize.report(without_memory(build), size, batch_size=2, scenarios="fp32")
    summary = torchinfo.summary(build(), (2, *size), verbose=0, device="cpu")
    assert report.totals.parameters == summary.total_params
    assert report.totals.trainable == summary.trainable_params
    assert report.totals.parameter_bytes == summary.total_param_bytes
    # torchinfo's forward/backward size is twice the outputs of the layers that own parameters.
    own = [layer for layer in report.trace.layers if layer.leaf and layer.parameters]
    assert 2 * sum(layer.output_bytes for layer in own) == summary.total_output_bytes


def test_json_has_the_promised_keys_and_adds_up(toy: Report) -> None:
    data = json.loads(toy.to_json())
    assert data["parameters"] == {"count": 9_223_901, "trainable": 9_223_901, "bytes": 36_895_604}
    assert sum(layer["parameters"] for layer in data["layers"]) == 9_223_901
    assert sum(layer["saved_bytes"] for layer in data["layers"]) == 25_317_952
    by_name = {entry["name"]: entry for entry in data["scenarios"]}
    assert by_name["amp-bf16"]["saved_bytes"] == 31_103_176
    assert by_name["int4-weight"]["status"] == "unavailable"
    assert by_name["int4-weight"]["parameter_bytes"] is None
    assert {"code", "layers", "bytes", "text"} <= set(data["findings"][0])


def test_dataframes(toy: Report) -> None:
    assert toy.layers["parameter_bytes"].sum() == 36_895_604
    assert toy.scenarios.loc["fp16", "parameter_bytes"] == 18_447_802
    assert toy.tensors["bytes"].sum() == 36_895_604


def test_input_forms_give_the_same_report() -> None:
    model = models.Small()
    sized = memsize.report(model, (3, 32, 32), batch_size=2, scenarios="fp32,amp-bf16")
    texted = memsize.report(model, "3,32,32", batch_size=2, scenarios="fp32,amp-bf16")
    given = memsize.report(model, input_data=torch.randn(2, 3, 32, 32), scenarios="fp32,amp-bf16")
    named = memsize.report(model, input_data={"x": torch.randn(2, 3, 32, 32)}, scenarios="fp32,amp-bf16")
    assert sized.totals == texted.totals == given.totals == named.totals
    # Resizing explicit data finds the same crossover as resizing a size.
    crossings = [{f.code: f.values.get("batch") for f in r.why()}["amp-crossover"] for r in (sized, given, named)]
    assert crossings[0] == crossings[1] == crossings[2]


def test_without_an_input_the_report_shows_what_is_stored() -> None:
    model = models.Small()
    report, run = memsize.report(model), memsize.report(model, (3, 32, 32))
    assert report.totals.parameters == run.totals.parameters == sum(p.numel() for p in model.parameters())
    stored = ["path", "parameters", "parameter_bytes", "buffer_bytes"]
    assert report.layers[stored].equals(run.layers[stored])
    assert not report.trace.ran and run.trace.ran and not report.scenario_results
    [missing] = report.findings
    assert missing.code == "no-input" and "its forward takes x" in missing.text() and "input_size" in missing.text()
    text = render(report, "text", unit="MiB", width=200)
    assert missing.text() in text.splitlines()[2] and "Why" not in text
    assert "never called" not in text and "kept for" not in text and "output" not in text
    data = json.loads(report.to_json())
    assert data["totals"]["saved_bytes"] is None and data["totals"]["parameter_bytes"] == run.totals.parameter_bytes
    assert {layer["output_bytes"] for layer in data["layers"]} == {None}


@pytest.mark.parametrize("asked", [{"train": "adamw"}, {"execute": True}, {"scenarios": "fp16"}])
def test_what_has_to_be_run_says_which_input_is_missing(asked: dict[str, object]) -> None:
    with pytest.raises(memsize.InputError, match=r"its forward takes x"):
        memsize.report(models.Small(), **asked)


def test_a_batch_of_one_that_batch_norm_refuses() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4))
    with pytest.raises(
        memsize.ForwardError, match=r"use batch_size=2, or mode eval \(batch_size=2, or mode=\"eval\"\)"
    ):
        memsize.report(model, (3, 8, 8))
    assert memsize.report(model, (3, 8, 8), mode="eval", scenarios="fp32").totals.parameters == 3 * 4 * 64 + 4 + 8


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(3), nn.InstanceNorm2d(3)]
)
def test_a_size_that_includes_the_batch(layer: nn.Module) -> None:
    advice = "a size is given without the batch, which batch_size sets"
    with pytest.raises(memsize.ForwardError, match=advice):
        memsize.report(nn.Sequential(layer), (8, 3, 32, 32))
    with pytest.raises(memsize.ForwardError) as other:  # one image of another number of channels
        memsize.report(nn.Sequential(layer), (1, 32, 32, 4, 4))
    assert advice not in str(other.value)


def test_weight_only_layouts_run_as_the_library_does() -> None:
    pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to("meta")
    report = memsize.report(
        model, (64,), batch_size=4, scenarios="int8-weight,torchao:Int8WeightOnlyConfig", train="sgd"
    )
    ours, theirs = (figures(report, name) for name in ("int8-weight", "torchao:Int8WeightOnlyConfig"))
    assert ours.parameter_bytes == theirs.parameter_bytes
    assert ours.output_bytes == theirs.output_bytes
    # The second layer's copy is kept, for its input needs a gradient: 128·10·4 bytes; the first one's is not.
    assert ours.saved_bytes == theirs.saved_bytes


def test_a_quantized_model_as_given_is_compared_with_its_float32_size() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = models.Toy()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    report = memsize.report(model, (3, 64, 64), scenarios="as-given")
    assert figures(report, "as-given").parameter_bytes == 26_803_609
    share = scenario(report, "as-given").share("parameter_bytes", report.fp32)
    assert share == pytest.approx(26_803_609 / 36_895_604)
    assert "wrapper-misreports" in [finding.code for finding in report.why()]


def vgg16() -> nn.Module:
    """Simonyan and Zisserman, 2014, configuration D."""
    layers: list[nn.Module] = []
    before = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(True)] if width else [nn.MaxPool2d(2)]
        before = width or before
    head = [
        nn.Linear(512 * 7 * 7, 4096),
        nn.ReLU(True),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(True),
        nn.Dropout(),
    ]
    return nn.Sequential(*layers, nn.Flatten(), *head, nn.Linear(4096, 1000))


def test_the_known_table_of_vgg16() -> None:
    report = memsize.report(without_memory(vgg16), (3, 224, 224), scenarios="fp32,fp16")
    assert figures(report, "fp32").parameters == 138_357_544
    assert figures(report, "fp16").parameter_bytes == 2 * 138_357_544
    layers = report.layers.set_index("path")
    # The first linear layer alone: 25,088·4,096 + 4,096.
    assert layers.loc["32", "parameters"] == 102_764_544
    convolutions = layers[layers["type"] == "Conv2d"]
    assert convolutions["parameters"].sum() == 14_714_688
    # Two convolutions of 64 at 224², two of 128 at 112², three of 256, 512 and 512 at 56², 28² and 14².
    elements = 2 * 64 * 224**2 + 2 * 128 * 112**2 + 3 * 256 * 56**2 + 3 * 512 * 28**2 + 3 * 512 * 14**2
    assert convolutions["output_bytes"].sum() == 4 * elements
    assert layers[layers["type"] == "ReLU"]["output_bytes"].sum() == 0


def test_the_known_table_of_resnet50() -> None:
    report = memsize.report(without_memory(ResNet50), (3, 224, 224), scenarios="fp32")
    assert report.totals.parameters == 25_557_032
    layers = report.layers
    # The 11.1 million activations that are published for ResNet-50; each batch norm's output is as large.
    assert layers[layers["type"] == "Conv2d"]["output_bytes"].sum() == 4 * 11_113_984
    assert layers[layers["type"] == "BatchNorm2d"]["output_bytes"].sum() == 4 * 11_113_984
    # Running mean and variance of every channel in float32, and a counter of 8 bytes for each of 53 norms.
    assert report.totals.buffer_bytes == 2 * 4 * 26_560 + 53 * 8


def test_a_page_says_over_what_its_charts_are() -> None:
    """Without training the chart is over one forward, with it over its steps."""
    charts = {
        train: render(memsize.report(nn.Linear(4, 2), (4,), scenarios="fp32", train=train), "html")
        for train in (None, "sgd")
    }
    assert "Live bytes over a forward of the whole model" in charts[None]
    assert "Live bytes over 3 training steps" in charts["sgd"] and "over a forward" not in charts["sgd"]
