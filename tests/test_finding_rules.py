"""Each rule from numbers to causes on evidence made by hand: its thresholds, its figures, and when it keeps quiet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from memsize import Finding, Trace
from memsize.records.trace import InputTensor, Layer, Storage, StoredPart, StoredTensor, TensorSpec, ToolReport
from tests.records import Audit, Copy, GpuEstimate, Interval, LayerFormats, Loss, Run, Shortage, layer, spec, stored
from tests.rules import Crossover, Evidence, layout, precision, report_rules, training

Rule = Callable[[Evidence], Iterator[Finding]]


def trace(*tensors: StoredTensor, layers: tuple[Layer, ...] = (), inputs: tuple[InputTensor, ...] = ()) -> Trace:
    paths = dict.fromkeys(["", *(tensor.layer for tensor in tensors)])
    made = layers or tuple(layer(path, "Linear" if path else "Net", leaf=bool(path)) for path in paths)
    return Trace("nets:Net", "as-given", True, 1, "2.13.0", inputs, made, tensors)


def one(rule: Rule, evidence: Evidence) -> Finding:
    [finding] = rule(evidence)
    assert "{" not in finding.text()  # every value that the sentence wants is there
    return finding


def wrapped(name: str, dtype: str, *parts: tuple[str, str, tuple[int, ...], int], **more: Any) -> StoredTensor:
    """A tensor that stores `parts` in place of the dtype that it shows."""
    held = tuple(StoredPart(part, TensorSpec(kind, shape), size) for part, kind, shape, size in parts)
    plain = stored(name, dtype, 64, 64, wrapper="Int8Tensor", parts=held, **more)
    return replace(plain, bytes=sum(part.bytes for part in held))


# --- what a summary assumes


def test_four_bytes_each_are_no_finding_where_nothing_is_smaller() -> None:
    given = trace(stored("a.weight", "float32", 10, 10))
    assert not list(precision.summary_assumes_four_bytes(Evidence(given)))
    assert not list(precision.summary_assumes_four_bytes(Evidence(given, {"fp16": given})))
    assert not list(precision.summary_assumes_four_bytes(Evidence(trace())))


@pytest.mark.parametrize("scenario", ["fp16", "bf16", "apex-O3"])
def test_casting_does_shrink_what_is_stored(scenario: str) -> None:
    given = trace(stored("a.weight", "float32", 512, 1024))
    half = trace(stored("a.weight", "float16", 512, 1024))
    finding = one(precision.summary_assumes_four_bytes, Evidence(given, {scenario: half}))
    # 524,288 elements: 2 MiB in four bytes each, 1 MiB in two
    assert finding.bytes == 2**20
    assert finding.text().startswith("Casting to fp16 or bf16 halves the parameters, 2.00 MiB → 1.00 MiB;")
    assert (
        "prints 2.00 MB assumes 4 bytes per parameter. torchsummary counts 4 bytes for each of the 524,288 parameters"
        in finding.text()
    )


def test_the_first_scenario_that_halves_is_compared() -> None:
    given = trace(stored("a.weight", "float32", 512, 1024))
    runs = {
        "bf16": trace(stored("a.weight", "int8", 512, 1024)),
        "fp16": trace(stored("a.weight", "float16", 512, 1024)),
    }
    assert one(precision.summary_assumes_four_bytes, Evidence(given, runs)).values["half"] == 2**20


def test_other_tools_are_quoted_in_units_of_a_million_bytes() -> None:
    readings = (ToolReport("torchinfo", 10, 2_500_000), ToolReport("Lightning", 10, 1_000_000))
    finding = one(
        precision.summary_assumes_four_bytes,
        Evidence(trace(stored("a.weight", "float16", 10, 10)), readings=readings),
    )
    assert finding.text().endswith(
        "whatever their dtype; torchinfo reports 2.50 MB for the model as it is and Lightning reports 1.00 MB for the "
        "model as it is, in units of 10^6 bytes."
    )


def test_the_bytes_of_each_parameter_are_told_to_three_digits() -> None:
    # 100 in two bytes and 50 in four: 400 B of 150
    given = trace(stored("a.weight", "float16", 10, 10), stored("b.weight", "float32", 50))
    assert "take 2.67 bytes each" in one(precision.summary_assumes_four_bytes, Evidence(given)).text()


# --- autocast


AMP = trace(
    stored("a.weight", "float32", 100),
    layers=(layer("", "Net", leaf=False), layer("a", "Linear", cast_bytes=200), layer("b", "ReLU")),
)


def test_autocast_casts_no_parameter() -> None:
    finding = one(precision.amp_keeps_fp32_parameters, Evidence(AMP, {"amp-bf16": AMP}, amp="amp-bf16"))
    assert (finding.bytes, finding.layers, finding.values["dtype"]) == (200, ("a",), "bf16")
    assert finding.values["bytes"] == 400
    assert finding.text("B") == (
        "Autocast leaves the parameters in float32 (400 B) and adds 200 B of bf16 copies. Gradients and optimizer "
        "state stay in float32 too."
    )
    assert not list(precision.amp_keeps_fp32_parameters(Evidence(AMP, {"amp-bf16": AMP})))
    assert not list(precision.amp_keeps_fp32_parameters(Evidence(AMP, {"amp-bf16": trace()}, amp="amp-bf16")))


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (None, "With this input autocast keeps more than float32 at every batch size: at batch 3"),
        (1, "With this input autocast keeps less than float32 at every batch size: at batch 3"),
        (2, "With this input autocast keeps more than float32 up to batch 1 and less at batch 2 and above: at batch 3"),
        (9, "With this input autocast keeps more than float32 up to batch 8 and less at batch 9 and above: at batch 3"),
    ],
)
def test_where_autocast_begins_to_pay(batch: int | None, sentence: str) -> None:
    crossing = Crossover(batch, start=3, first=5_000, second=3_000, first_per_sample=900, second_per_sample=400)
    evidence = Evidence(AMP, {"amp-fp16": AMP}, amp="amp-fp16", crossover=crossing)
    _, finding = precision.amp_keeps_fp32_parameters(evidence)
    assert (finding.code, finding.bytes) == ("amp-crossover", -2_000)
    assert finding.text("B").startswith(sentence)
    assert "autocast keeps 3,000 B for backward, float32 5,000 B" in finding.text("B")
    if batch is None:
        assert finding.text("B").endswith("each further sample adds 400 B instead of 900 B.")


@pytest.mark.parametrize(
    ("per_sample", "code", "batch", "gain"),
    [
        # 100 float32 elements: 400 B, half of which is 200
        (199, "parameters-dominate", 3, 1),
        (200, "parameters-dominate", 2, 1),  # half the parameters make room for exactly one
        (201, "activations-dominate", 2, 0),
        (100, "parameters-dominate", 4, 2),
        (400, "activations-dominate", 1, 0),
    ],
)
def test_what_binds_the_batch(per_sample: int, code: str, batch: int, gain: int) -> None:
    evidence = Evidence(AMP, {"fp32": AMP}, crossover=Crossover(None, 1, 0, 0, per_sample, 0))
    finding = one(precision.what_binds_the_batch, evidence)
    assert (finding.code, finding.bytes) == (code, per_sample)
    assert (finding.values["batch"], finding.values["gain"], finding.values["half"]) == (batch, gain, 200)


def test_what_binds_the_batch_needs_both_figures() -> None:
    crossing = Crossover(None, 1, 0, 0, 1, 0)
    assert list(precision.what_binds_the_batch(Evidence(AMP, {"fp32": AMP}, crossover=crossing)))
    assert not list(precision.what_binds_the_batch(Evidence(AMP, {"fp32": AMP})))
    assert not list(precision.what_binds_the_batch(Evidence(AMP, {}, crossover=crossing)))
    assert not list(precision.what_binds_the_batch(Evidence(AMP, {"fp32": trace()}, crossover=crossing)))
    level = replace(crossing, first_per_sample=0)
    assert not list(precision.what_binds_the_batch(Evidence(AMP, {"fp32": AMP}, crossover=level)))


# --- dtypes


def test_mixed_dtypes_name_the_widest_and_where_it_is() -> None:
    tensors = (
        stored("a.weight", "float16", 10),
        stored("b.weight", "float32", 10),
        stored("b.bias", "float32", 5),
        stored("c.weight", "bfloat16", 10),
    )
    finding = one(precision.mixed_dtypes, Evidence(trace(*tensors)))
    assert (finding.code, finding.bytes, finding.layers) == ("mixed-dtypes", 60, ("b",))
    assert finding.text("B") == (
        "Only part of the model was converted: float16 20 B, float32 60 B, bfloat16 20 B. Still float32: b."
    )


@pytest.mark.parametrize(
    ("first", "second", "widest"),
    [
        ("float16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "float64", "float64"),
    ],
)
def test_which_dtype_is_wider(first: str, second: str, widest: str) -> None:
    def tensor(name: str, dtype: str) -> StoredTensor:
        return replace(stored(name, "float32", 4), spec=spec(dtype, 4))

    finding = one(precision.mixed_dtypes, Evidence(trace(tensor("a.weight", first), tensor("b.weight", second))))
    assert finding.layers == ("b",)
    assert f"Still {widest}: b." in finding.text()


def test_batch_norms_alone_in_float32_are_no_neglect() -> None:
    layers = (layer("a", "Linear"), layer("n", "BatchNorm2d"), layer("m", "SyncBatchNorm"))
    tensors = (stored("a.weight", "float16", 10), stored("n.weight", "float32", 2), stored("m.weight", "float32", 3))
    finding = one(precision.mixed_dtypes, Evidence(trace(*tensors, layers=layers)))
    assert (finding.code, finding.bytes, finding.layers) == ("batch-norm-kept-fp32", 20, ("n", "m"))
    one_more = (*tensors, stored("x.weight", "float32", 1))
    assert one(precision.mixed_dtypes, Evidence(trace(*one_more, layers=layers))).code == "mixed-dtypes"


def test_one_dtype_wrapped_values_and_integers_are_not_mixed() -> None:
    plain = stored("a.weight", "float32", 10)
    assert not list(precision.mixed_dtypes(Evidence(trace(plain))))
    assert not list(precision.mixed_dtypes(Evidence(trace(plain, stored("b.weight", "int8", 10)))))
    half = wrapped("b.weight", "float16", ("qdata", "int8", (64, 64), 4096))
    assert not list(precision.mixed_dtypes(Evidence(trace(plain, half))))


def test_a_wrapper_that_stores_what_it_says_is_no_finding() -> None:
    # 64 · 64 · 4 = 16,384 B is what float32 would take
    wrong = wrapped("a.weight", "float32", ("qdata", "int8", (64, 64), 4096), ("scale", "float32", (64,), 256))
    finding = one(precision.wrappers_that_misreport, Evidence(trace(wrong)))
    assert (finding.bytes, finding.layers, finding.values["said"]) == (4_352, ("a",), 16_384)
    assert finding.values["dtypes"] == ("int8", "float32")
    assert finding.values["names"] == ("Int8Tensor",)
    same = wrapped("a.weight", "float32", ("data", "float32", (64, 64), 16_384))
    shared = replace(wrong, bytes=0)
    for tensor in (same, shared, replace(wrong, parts=())):
        assert not list(precision.wrappers_that_misreport(Evidence(trace(tensor))))
    unnamed = replace(wrong, wrapper=None, kind="packed")
    assert one(precision.wrappers_that_misreport, Evidence(trace(unnamed))).values["names"] == ("packed",)


def test_low_bits_in_wide_containers() -> None:
    wide = wrapped("a.weight", "float32", ("qdata", "int8", (64, 64), 4096))
    scale = StoredPart("scale", spec("float32", 64), 256)
    named = replace(wide, wrapper="IntxUnpackedToInt8Tensor", parts=(*wide.parts, scale))
    finding = one(report_rules.low_bits_in_wide_containers, Evidence(trace(named)))
    assert (finding.bytes, finding.layers, finding.values["count"]) == (4096, ("a",), 4096)
    assert finding.text().startswith("as-given stores 4,096 weights of fewer than 8 bits in 8-bit")
    assert not list(report_rules.low_bits_in_wide_containers(Evidence(trace(wide))))
    packed = replace(named, parts=(StoredPart("qdata", spec("uint8", 64, 32), 2048),))
    assert not list(report_rules.low_bits_in_wide_containers(Evidence(trace(packed))))
    runs = {"torchao:X": trace(named), "fp32": trace(named)}
    evidence = Evidence(trace(wide), runs, skipped_layers={"torchao:X": {}, "torchao:Y": {}})
    assert one(report_rules.low_bits_in_wide_containers, evidence).values["name"] == "torchao:X"


def test_what_a_quantization_leaves() -> None:
    done = wrapped("a.weight", "float32", ("qdata", "int8", (64, 64), 4096))
    packed = replace(stored("p.weight", "int8", 100), kind="packed")
    kept = stored("b.weight", "float16", 10, 10)
    also = stored("c.weight", "float32", 30)
    buffer = stored("c.mean", "float32", 8, kind="buffer")
    run = trace(done, packed, kept, also, buffer, stored("d.weight", "float16", 10, 10, tied_to="b.weight"))
    left = {"b": "too small", "c": "too small", "e": "no Linear"}
    finding = one(report_rules.quantization_leaves_layers, Evidence(run, {"int8": run}, skipped_layers={"int8": left}))
    assert (finding.bytes, finding.layers) == (200 + 120, ("b", "c", "e"))
    assert finding.values["done"] == ("a", "p")
    assert finding.values["small"] == 4096 + 100
    assert finding.values["dtypes"] == ("float16", "float32")
    assert finding.values["reason"] == "too small; no Linear"
    for evidence in (
        Evidence(run, {"int8": run}, skipped_layers={"int8": {}}),
        Evidence(run, {"int8": trace(kept)}, skipped_layers={"int8": left}),
    ):
        assert not list(report_rules.quantization_leaves_layers(evidence))


def test_copies_of_quantized_weights_that_are_kept() -> None:
    """Of four copies only the first has a quantized layer, its weight's shape, and is kept."""
    weight = wrapped("a.weight", "float32", ("qdata", "int8", (64, 64), 4096))
    copies = tuple(
        Storage(4 * 64 * 64, "activation", of, op, "float32", shape, kept)
        for of, op, shape, kept in (
            (1, "_to_copy", (64, 64), 1),
            (1, "_to_copy", (64, 64), -1),
            (2, "_to_copy", (64, 64), 2),
            (1, "_to_copy", (64, 32), 1),
            (1, "mul", (64, 64), 1),
        )
    )
    layers = (layer("", "Net", leaf=False), layer("a", "Linear"), layer("b", "Linear"))
    run = replace(trace(weight, stored("b.weight", "float32", 64, 64), layers=layers), storages=copies)
    finding = one(report_rules.quantized_weights_unpacked, Evidence(run, {"int8": run}, skipped_layers={"int8": {}}))
    assert (finding.bytes, finding.layers, finding.values["dtypes"]) == (16_384, ("a",), ("float32",))
    assert finding.text("B").startswith("int8 unpacks the weights of a to float32 for each product")
    for evidence in (Evidence(run), Evidence(run, {"int8": run}), Evidence(run, {"int8": trace(weight)}, {"int8": {}})):
        assert not list(report_rules.quantized_weights_unpacked(evidence))


def between(*kept: tuple[int, str, int, int]) -> Evidence:
    """A net that keeps storages, each of so many bytes, made by an op, kept in a layer and at a line."""
    storages = tuple(
        Storage(size, "activation", 1, op, "uint8", (size,), by, line=at, saved_at=at) for size, op, by, at in kept
    )
    layers = (layer("", "Net", leaf=False), layer("a", "Linear"))
    return Evidence(replace(trace(layers=layers), storages=storages, lines=("net.py:5", "net.py:6")))


def test_what_functions_keep_is_told_line_by_line() -> None:
    """Of 1,000 kept bytes 600 and 300 are kept in the model itself, at two lines; a layer keeps the others."""
    evidence = between((500, "relu", 0, 1), (100, "mul", 0, 1), (300, "addmm", 0, 0), (100, "relu", 1, 0))
    finding = one(report_rules.kept_by_functions, evidence)
    assert (finding.bytes, finding.layers) == (900, ("",))
    assert finding.text("B") == (
        "Functions keep 900 B of the 1,000 B for backward; the table attributes it to their modules, "
        "the model itself: 600 B at net.py:6 (results of relu and mul), 300 B at net.py:5 (results of addmm)."
    )


def test_little_that_functions_keep_is_not_told() -> None:
    """99 of 1,000 bytes are below a tenth, 100 are not."""
    assert list(report_rules.kept_by_functions(between((100, "relu", 0, 1), (900, "relu", 1, 0))))
    assert not list(report_rules.kept_by_functions(between((99, "relu", 0, 1), (901, "relu", 1, 0))))


@pytest.mark.parametrize(("elements", "told"), [(127, False), (128, True)])
def test_integer_buffers_are_told_from_1024_bytes(elements: int, told: bool) -> None:
    given = trace(stored("a.index", "int64", elements, kind="buffer"))
    found = list(report_rules.what_halving_cannot_halve(Evidence(given)))
    assert bool(found) == told
    if told:
        assert (found[0].bytes, found[0].layers) == (1024, ("a",))
        assert found[0].text("B") == "Half precision does not shrink integer buffers (1,024 B)."


def test_halving_leaves_integer_inputs() -> None:
    ids = InputTensor("ids", spec("int64", 1, 5), 40)
    image = InputTensor("image", spec("float32", 1, 3), 12)
    table = stored("a.index", "int64", 128, kind="buffer")
    floating = stored("a.mean", "float32", 1024, kind="buffer")
    weight = stored("a.weight", "int64", 1024)
    finding = one(report_rules.what_halving_cannot_halve, Evidence(trace(table, floating, weight, inputs=(ids, image))))
    assert finding.bytes == 1024 + 40
    assert finding.text("B") == (
        "Half precision does not shrink integer buffers (1,024 B) and integer inputs (40 B: ids int64[1,5])."
    )
    assert not list(report_rules.what_halving_cannot_halve(Evidence(trace(floating, inputs=(image,)))))


def test_apex_o2_holds_master_weights() -> None:
    run = trace(
        stored("a.weight", "float16", 100),
        stored("a.frozen", "float16", 10, trainable=False),
        stored("b.weight", "float16", 100, tied_to="a.weight"),
        stored("norm.weight", "float32", 8),
        stored("norm.mean", "float32", 8, kind="buffer"),
        stored("x.table", "float32", 50, kind="attribute"),
    )
    finding = one(report_rules.norms_kept_in_fp32, Evidence(run, {"apex-O2": run}))
    assert (finding.bytes, finding.layers, finding.values["kept"]) == (400, ("norm",), 64)
    assert finding.text("B").endswith("400 B of float32 master weights, and batch norms stay float32 (64 B).")
    bare = trace(stored("a.weight", "float16", 100))
    assert one(report_rules.norms_kept_in_fp32, Evidence(bare, {"apex-O2": bare})).text("B").endswith("master weights.")
    assert not list(report_rules.norms_kept_in_fp32(Evidence(run, {"apex-O1": run})))


# --- the peak of a step


def peak(requested: int = 1000, phase: str = "backward", place: str = "", **roles: int) -> GpuEstimate:
    told = {name.replace("_", " "): size for name, size in roles.items()}
    return GpuEstimate(requested, 0, 0, Interval(0, 0), 0.0, phase, 2, place, "aten.mm", told, ())  # type: ignore[arg-type]


def test_a_role_is_named_from_a_twentieth_of_the_peak_and_four_at_most() -> None:
    roles = {"activation": 400, "parameter": 300, "gradient": 150, "temporary": 51, "input": 50, "output": 49}
    finding = one(training.training_peak, Evidence(trace(), peaks={"fp32": peak(**roles)}))
    assert "activations 400 B, parameters 300 B, gradients 150 B, temporaries 51 B. " in finding.text("B")
    fewer = one(training.training_peak, Evidence(trace(), peaks={"fp32": peak(activation=901, input=50, output=49)}))
    assert "mostly activations 901 B, inputs 50 B. " in fewer.text("B")


@pytest.mark.parametrize(("fp16", "told"), [(998, True), (999, False), (1000, False), (1001, False)])
def test_another_scenario_peaks_lowest_where_it_saves_more_than_a_thousandth(fp16: int, told: bool) -> None:
    evidence = Evidence(trace(), peaks={"as-given": peak(1000), "fp16": peak(fp16)})
    brief = one(training.training_peak, evidence).in_brief("B")
    assert brief.endswith(f" fp16 peaks lowest, at {fp16} B.") == told


def test_scenarios_that_peak_as_low_are_all_named() -> None:
    """On a GPU without bfloat16, amp-bf16 alone would be the wrong advice for 0.04 %."""
    peaks = {"fp32": peak(10_000), "amp-fp16": peak(5_004), "amp-bf16": peak(5_000)}
    brief = one(training.training_peak, Evidence(trace(), peaks=peaks)).in_brief("B")
    assert brief.endswith(" amp-fp16 and amp-bf16 peak lowest, at 5,000 B.")


def test_which_scenarios_peak_is_told() -> None:
    first, second, third = peak(1), peak(2), peak(3)
    told = [
        one(training.training_peak, Evidence(trace(), peaks=found)).values["name"]
        for found in (
            {"amp-fp16": third, "fp32": second, "as-given": first},
            {"amp-fp16": third, "fp32": second},
            {"bf16": third, "amp-fp16": second},
        )
    ]
    assert told == ["as-given", "fp32", "bf16"]
    assert not list(training.training_peak(Evidence(trace())))


def test_a_step_of_the_targets_own_is_told_as_such() -> None:
    finding = one(training.training_peak, Evidence(trace(), peaks={"fp32": peak(activation=900)}, optimizer="own"))
    assert finding.text().startswith("A training step with its own optimizer in fp32 fits on ")


@pytest.mark.parametrize("certain", [None, False, True])
def test_a_peak_says_whether_it_fits(certain: bool | None) -> None:
    """Where it doesn't, `does_not_fit` has said so."""
    shortage = None if certain is None else Shortage(1, 1, 1, 1, 1, 1, "backward", 2, "fc", "mm", certain)
    evidence = Evidence(trace(), peaks={"fp32": replace(peak(1000), shortage=shortage)}, gpu="Tesla T4")
    begins, ends = "With enough memory, {} in fp32 peaks", "at 1,000 B, in the backward."
    if certain is None:
        begins = "{} in fp32 fits on Tesla T4: it peaks"
    of_training = one(training.training_peak, evidence).in_brief("B")
    inference = replace(evidence, inference=evidence.peaks, peaks={})
    of_inference = one(training.inference_peak, inference).in_brief("B")
    what = ("A training step with", "Inference") if certain is None else ("a training step with", "inference")
    assert of_training.startswith(begins.format(what[0]).partition(" in fp32")[0]) and of_training.endswith(ends)
    assert of_inference == f"{begins.format(what[1])} {ends}"
    assert not list(training.inference_peak(replace(inference, untrained={"fp32": "it has no loss"})))


@pytest.mark.parametrize(
    ("found", "where", "advice"),
    [
        (peak(place="conv", activation=900), "in the backward of conv.", "Most of it grows with the batch size."),
        (peak(place="1", activation=900), "in the backward of layer 1.", "Most of it grows with the batch size."),
        (peak(phase="optimizer", temporary=300), "in the optimizer's update.", "temporaries take 300 B of it"),
        (peak(phase="zero_grad"), "in the zeroing of gradients.", "Most of it grows with the batch size."),
        # Half of it is not most of it
        (
            peak(phase="forward", parameter=250, gradient=250),
            "in the forward.",
            "Most of it grows with the batch size.",
        ),
        (
            peak(phase="forward", parameter=100, gradient=100, optimizer_state=201, master_weight=100),
            "in the forward.",
            "Parameters, gradients and optimizer state take 501 B of it at any batch size.",
        ),
        # 300 B are the parameters', 250 B more the model's too
        (
            peak(parameter=300, workspace=150, gathered_parameter=100, activation=450),
            "in the backward.",
            "550 B of it is independent of the batch size, mostly parameters.",
        ),
        (
            peak(workspace=501),
            "in the backward.",
            "501 B of it is independent of the batch size, mostly workspaces.",
        ),
    ],
)
def test_what_is_said_of_a_peak(found: GpuEstimate, where: str, advice: str) -> None:
    finding = one(training.training_peak, Evidence(trace(), peaks={"fp32": found}, optimizer="adamw"))
    assert " in fp32 fits on " in finding.text("B") and ": it peaks at 1,000 B, in the " in finding.text("B")
    assert where in finding.text("B") and advice in finding.text("B")
    assert finding.layers == ((found.peak_layer,) if found.peak_layer else ())
    assert finding.bytes == 1000
    assert finding.values["temporary"] == found.roles.get("temporary", 0)


def short(certain: bool, place: str = "conv") -> GpuEstimate:
    held = {"request": 30, "tried": 40, "total": 1000, "free": 39, "allocated": 500, "reserved": 561}
    return replace(peak(), shortage=Shortage(**held, phase="optimizer", step=2, layer=place, op="", certain=certain))


def test_a_run_that_does_not_fit_says_what_pytorch_would() -> None:
    evidence = Evidence(trace(), peaks={"fp32": peak(), "bf16": short(True)}, gpu="Tesla T4")
    finding = one(training.does_not_fit, evidence)
    assert finding.text("B") == (
        "Training under bf16 does not fit on Tesla T4: it runs out of memory in the optimizer of conv. fp32 fits. The "
        "peaks are those of the same run with enough memory. PyTorch's error would then say that it tried to allocate "
        "40 B; of 1,000 B, 39 B are free, 500 B are allocated by PyTorch, and 61 B are reserved but unallocated."
    )
    assert (finding.bytes, finding.layers) == (40, ("conv",))


def test_a_run_may_fit_if_the_context_is_small() -> None:
    finding = one(training.does_not_fit, Evidence(trace(), inference={"fp32": short(False, "")}, gpu="L4"))
    assert finding.text("B").startswith(
        "Inference under fp32 may not fit on L4: if the CUDA context takes 400 B, it runs out of memory in the "
        "optimizer's update. PyTorch's"
    )
    assert finding.layers == ()


def test_of_several_scenarios_that_do_not_fit_the_first_is_told() -> None:
    several = {"fp32": peak(), "fp16": short(True), "bf16": short(True)}
    found = list(training.does_not_fit(Evidence(trace(), peaks=several, inference=several, gpu="L4")))
    assert [each.text().split(" does not")[0] for each in found] == [
        "Training under fp16 and bf16",
        "Inference under fp16 and bf16",
    ]
    assert not list(training.does_not_fit(Evidence(trace(), peaks={"fp32": peak()})))


# --- several GPUs


def test_data_parallel_copies_what_is_inside_it() -> None:
    tensors = (
        stored("body.module.weight", "float32", 10),
        stored("body.module.mean", "float32", 2, kind="buffer"),
        stored("body.module.table", "float32", 5, kind="attribute"),
        stored("bodyguard.weight", "float32", 100),
    )
    layers = (layer("", "Net", leaf=False), layer("body", "DataParallel", leaf=False, saved_bytes=70))
    finding = one(training.data_parallel, Evidence(trace(*tensors, layers=layers)))
    assert (finding.bytes, finding.layers) == (48, ("body",))
    assert (finding.values["saved"], finding.values["copied"]) == (70, 48)
    whole = trace(*tensors, layers=(layer("", "DataParallel", leaf=False),))
    assert one(training.data_parallel, Evidence(whole)).bytes == 448
    assert not list(training.data_parallel(Evidence(trace(*tensors))))


def test_gradient_buckets() -> None:
    assert not list(training.distributed(Evidence(trace())))
    beside = one(training.distributed, Evidence(trace(), buckets=(2048, False)))
    assert beside.bytes == 2048 and "gradient buckets take another 2,048 B" in beside.text("B")
    within = one(training.distributed, Evidence(trace(), buckets=(2048, True)))
    assert "its gradients are views of 2,048 B of buckets, which are never freed" in within.text("B")


# --- how tensors are held


def test_tied_parameters() -> None:
    given = trace(
        stored("embed.weight", "float32", 10),
        stored("head.weight", "float32", 10, tied_to="embed.weight"),
        stored("tail.weight", "float32", 10, tied_to="embed.weight"),
        stored("tail.mean", "float32", 10, kind="buffer", tied_to="norm.mean"),
    )
    finding = one(report_rules.tied, Evidence(given))
    assert (finding.bytes, finding.layers) == (80, ("head", "tail"))
    assert finding.values["owners"] == ("embed.weight",)
    assert not list(report_rules.tied(Evidence(trace(stored("a.weight", "float32", 1)))))


def test_unused_parameters() -> None:
    given = trace(
        stored("a.weight", "float32", 10, used=False),
        stored("b.weight", "float32", 10, used=None),
        stored("c.weight", "float32", 10, used=False, tied_to="a.weight"),
        stored("d.weight", "float32", 0, used=False),
        stored("e.mean", "float32", 10, kind="buffer", used=False),
    )
    finding = one(report_rules.unused, Evidence(given))
    assert (finding.bytes, finding.values["names"]) == (40, ("a.weight",))
    assert not list(report_rules.unused(Evidence(trace(stored("b.weight", "float32", 10)))))


def test_computed_weights_are_not_taken_for_forgotten_ones() -> None:
    given = trace(
        stored("a.table", "float32", 10, kind="attribute"),
        stored("a.empty", "float32", 0, kind="attribute"),
        stored("b.weight", "float32", 20, kind="attribute"),
        stored("b.weight_orig", "float32", 20),
        stored("b.weight_mask", "float32", 20, kind="buffer"),
        stored("c.weight", "float32", 30, kind="attribute"),
        stored("c.weight_v", "float32", 30),
        stored("d.attention_mask", "float32", 40, kind="buffer"),
    )
    finding = one(report_rules.unregistered, Evidence(given))
    assert (finding.bytes, finding.values["names"]) == (40, ("a.table",))
    # A mask of 80 B and the computed weights of 80 and 120 B
    pruned = one(report_rules.pruned, Evidence(given))
    assert (pruned.bytes, pruned.layers) == (80 + 80 + 120, ("b",))
    assert not list(report_rules.pruned(Evidence(trace(stored("d.attention_mask", "float32", 40, kind="buffer")))))


def test_parameters_out_of_reach_of_gradients() -> None:
    reached = stored("a.weight", "float32", 10)
    cut = stored("b.weight", "float32", 20, differentiable=False)
    others = (
        stored("c.weight", "float32", 10, differentiable=False, trainable=False),
        stored("d.weight", "float32", 10, differentiable=False, used=False),
        stored("e.weight", "float32", 10, differentiable=None),
        stored("f.weight", "float32", 10, differentiable=False, tied_to="b.weight"),
    )
    finding = one(report_rules.without_gradient, Evidence(trace(reached, cut, *others)))
    assert (finding.bytes, finding.layers) == (80, ("b",))
    assert not list(report_rules.without_gradient(Evidence(trace(cut, *others))))
    assert not list(report_rules.without_gradient(Evidence(trace(reached, *others))))


@pytest.mark.parametrize(("parameters", "told"), [(2500, True), (2501, False)])
def test_buffers_are_told_from_a_hundredth_of_the_parameters(parameters: int, told: bool) -> None:
    # 25 elements are 100 B; of 2,500 elements (10,000 B) that is a hundredth
    given = trace(stored("a.weight", "float32", parameters), stored("a.mean", "float32", 25, kind="buffer"))
    found = list(report_rules.buffers(Evidence(given)))
    assert [(finding.bytes, finding.layers) for finding in found] == ([(100, ("a",))] if told else [])


def test_no_buffers_are_no_finding() -> None:
    assert not list(report_rules.buffers(Evidence(trace())))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ((stored("a.weight", "int8", 10, kind="packed"), stored("b.w", "int8", 9, tied_to="a.w")), "packed weights"),
        (
            (stored("a.weight", "float32", 10, used=False), stored("b.w", "float32", 9, tied_to="a.weight")),
            "it counts tied parameters once for each layer",
        ),
        ((stored("a.weight", "float32", 10, used=False),), "it leaves out layers that are never called"),
        ((stored("a.weight", "float32", 10, used=None),), "it adds up the layers that were called"),
    ],
)
def test_why_another_summary_counts_differently(tensors: tuple[StoredTensor, ...], reason: str) -> None:
    evidence = Evidence(trace(*tensors), readings=(ToolReport("torchinfo", 7, 28), ToolReport("Lightning", 10, 40)))
    finding = one(report_rules.torchinfo_counts_differently, evidence)
    assert finding.text().startswith("torchinfo counts 7 parameters, the model stores 10:")
    assert reason in finding.text()
    assert finding.bytes is None


def test_the_order_of_findings_is_that_of_their_weight() -> None:
    given = trace(
        stored("a.weight", "float16", 100),
        stored("b.weight", "float32", 100, used=False),
        stored("b.mean", "float32", 100, kind="buffer"),
        stored("b.table", "float32", 100, kind="attribute"),
    )
    codes = [finding.code for finding in report_rules.RULES.findings(Evidence(given, buckets=(1, True)))]
    assert codes == [
        "mixed-dtypes",
        "summary-assumes-4-bytes",
        "gradient-buckets",
        "unregistered-tensors",
        "unused-parameters",
        "buffers-count-too",
    ]


# --- memory formats


def copy(
    where: str, op: str, size: int, *, hidden: bool = False, after: str = "row-major", dtype: str = "float32"
) -> Copy:
    before = "channels last" if after == "row-major" else "row-major"
    return Copy(where, op, spec(dtype, 1, 3, 4, 4), before, after, size, hidden)  # type: ignore[arg-type]


def audit(plain: tuple[Copy, ...] = (), last: tuple[Copy, ...] = (), **more: Any) -> Audit:
    losses, layers = more.pop("losses", ()), more.pop("layers", ())
    fields = {"converted": 1, "converted_inputs": 1} | more
    return Audit("nets:Net", (), "fp32", True, Run((), plain), Run(layers, last, losses), **fields)


def codes(found: Audit) -> list[tuple[str, int | None]]:
    return [(finding.code, finding.bytes) for finding in layout.RULES.findings(found)]


IMAGES = LayerFormats("conv", "Conv2d", 1, True, 1, outputs=("channels last",))


@pytest.mark.parametrize(
    ("plain", "last", "expected"),
    [
        (0, 100, ("channels-last-copies-more", 100)),
        (40, 100, ("channels-last-copies-more", 60)),
        (100, 40, ("channels-last-copies-less", 60)),
        (100, 0, ("channels-last-copies-less", 100)),
        (100, 100, ("channels-last-copies-the-same", 100)),
    ],
)
def test_the_verdict_on_channels_last(plain: int, last: int, expected: tuple[str, int]) -> None:
    def made(size: int) -> tuple[Copy, ...]:
        return (copy("body", "clone", size),) if size else ()

    found = layout.RULES.findings(audit(made(plain), made(last)))
    assert (found[0].code, found[0].bytes) == expected
    assert found[0].layers == ("body",)
    assert (
        found[0]
        .text("B")
        .startswith("Channels last copies nothing" if not last else f"Channels last copies {last} B per forward")
    )


def test_nothing_is_said_where_nothing_is_copied_or_kept() -> None:
    assert codes(audit()) == []


@pytest.mark.parametrize(("converted", "inputs"), [(0, 0), (1, 0), (0, 1)])
def test_there_is_something_to_convert_in_weights_or_in_inputs(converted: int, inputs: int) -> None:
    found = codes(audit(converted=converted, converted_inputs=inputs, last=(copy("body", "clone", 1),)))
    assert found == ([("channels-last-copies-more", 1)] if converted or inputs else [("nothing-to-convert", None)])


def test_channels_last_is_kept_where_no_op_loses_it_and_no_convolution_copies_back() -> None:
    holder = replace(IMAGES, path="", leaf=False)
    flat = replace(IMAGES, path="fc", outputs=("row-major",))
    kept = audit(layers=(holder, IMAGES, replace(IMAGES, path="tail"), flat))
    [finding] = layout.RULES.findings(kept)
    assert (finding.code, finding.values["count"]) == ("channels-last-kept", 2)
    lost = audit(layers=(IMAGES,), losses=(Loss("conv", "view", spec("float32", 1), "row-major"),))
    assert codes(lost) == [("format-lost", None)]
    back = audit(layers=(IMAGES,), last=(copy("conv", "convolution", 8, hidden=True, after="channels last"),))
    assert codes(back) == [("channels-last-copies-more", 8), ("convolution-copies-back", 8)]
    assert codes(audit(layers=(flat,))) == []


@pytest.mark.parametrize("op", ["clone", "_to_copy"])
def test_an_op_that_loses_the_format_is_told_once_with_what_it_copies(op: str) -> None:
    losses = tuple(Loss(where, op, spec("float32", 1), "row-major", "net.py:3") for where in ("a", "b", "a"))
    copies = (
        replace(copy("a", op, 10), place="net.py:3"),
        replace(copy("a", op, 5), place="net.py:9"),
        replace(copy("c", op, 7), place="net.py:3"),
        replace(copy("b", "cat", 1), place="net.py:3"),
    )
    _, finding = layout.RULES.findings(audit(last=copies, losses=losses))
    assert (finding.code, finding.bytes, finding.layers) == ("format-lost", 10, ("a", "b"))
    assert finding.text() == (
        "Channels last is lost in a and b at net.py:3: a copy to row-major (contiguous, reshape or flatten)."
    )


def test_the_lines_of_an_op_that_loses_the_format_are_one_finding() -> None:
    losses = [
        Loss(layer, "clone", spec("float32", 1), "row-major", f"net.py:{line}")
        for layer, line in zip("ab", (3, 9), strict=True)
    ]
    [finding] = layout.RULES.findings(audit(losses=tuple(losses)))
    assert finding.text().startswith("Channels last is lost in a and b at net.py:3 and net.py:9: ")


def test_other_ops_that_lose_the_format_are_named() -> None:
    [finding] = layout.RULES.findings(audit(losses=(Loss("a", "view", spec("float32", 1), "row-major"),)))
    assert finding.bytes is None
    assert finding.text() == "Channels last is lost in a: view returns row-major tensors."


def test_kernels_that_copy_what_they_are_given() -> None:
    copies = (
        copy("a", "convolution", 8, hidden=True, after="channels last"),
        copy("a", "convolution", 2, hidden=True),
        copy("b", "addmm", 3, hidden=True),
        copy("c", "addmm", 4, hidden=True),
        copy("c", "addmm", 16, hidden=True, after="channels last"),
        copy("d", "mm", 5, hidden=False),
    )
    listed = layout.RULES.findings(audit(last=copies))
    found = {finding.code: finding for finding in listed}
    assert len(listed) == len(found)
    assert set(found) == {"channels-last-copies-more", "convolution-copies-back", "kernel-copies"}
    assert (found["convolution-copies-back"].bytes, found["kernel-copies"].bytes) == (8, 7)
    assert found["kernel-copies"].text("B") == (
        "The input of b and c is not row-major, so addmm copies it first: 7 B in all."
    )
    [single] = [f for f in layout.RULES.findings(audit(last=copies[2:3])) if f.code == "kernel-copies"]
    assert single.text("B").startswith("The input of b is not row-major")


def test_float64_convolutions_stay_row_major() -> None:
    copies = (copy("a", "convolution", 8, dtype="float64"), copy("b", "clone", 8, dtype="float64"))
    assert ("float64-convolutions", None) in codes(audit(last=copies, double=True))
    [finding] = [f for f in layout.RULES.findings(audit(last=copies, double=True)) if f.code == "float64-convolutions"]
    assert finding.layers == ("a",)
    assert "float64-convolutions" not in dict(codes(audit(last=copies)))
    assert "float64-convolutions" not in dict(codes(audit(last=copies[1:], double=True)))
    single = (copy("a", "convolution", 8),)
    assert "float64-convolutions" not in dict(codes(audit(last=single, double=True)))
