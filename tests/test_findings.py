"""Each rule on a model made to show its cause; the crossover search on made-up measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn.utils import prune

import memsize
from memsize import Finding
from memsize.records.answer import FindingList
from memsize.render import render
from memsize.units import Bytes
from tests import models, records
from tests.pages import check_golden as check
from tests.records import Rules
from tests.rules import find_crossover


def found(model: nn.Module, size: object, **options: object) -> dict[str, Finding]:
    return {f.code: f for f in memsize.report(model, size, **options).why()}  # type: ignore[arg-type]


def test_half_parameters_say_what_a_summary_assumes() -> None:
    finding = found(nn.Sequential(nn.Linear(512, 512)).half(), (512,))["summary-assumes-4-bytes"]
    # (512·512 + 512) elements: 525,312 B in two bytes each; torchsummary's "%0.2f" of 1,050,624 / 2^20 is 1.00.
    assert finding.bytes == 525_312
    assert "2 bytes each" in finding.text()
    assert "prints 1.00 MB" in finding.text()


def test_partly_converted_models_name_what_was_left() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].half()
    with pytest.raises(memsize.ForwardError):
        memsize.report(model, (8,))
    comparison = memsize.diff(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), model)
    assert {"tensors-changed", "tensors-unchanged", "mixed-dtypes"} <= {f.code for f in comparison.why()}


def test_batch_norms_kept_in_float32_are_told_apart_from_neglect() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).half()
    model[1].float()
    finding = found(model, (3, 8, 8), batch_size=2)["batch-norm-kept-fp32"]
    assert finding.layers == ("1",)
    assert finding.bytes == 2 * 4 * 4


def test_tied() -> None:
    finding = found(models.Tied(), "16:int64")["tied-parameters"]
    assert (finding.bytes, finding.layers) == (272_640, ("head",))


def test_unused() -> None:
    finding = found(models.Unused(), (100,))["unused-parameters"]
    assert (finding.bytes, finding.layers) == (4 * 1_001_000, ("idle",))


def test_unregistered() -> None:
    assert found(models.Listed(), (100,))["unregistered-tensors"].bytes == 4 * 4 * 10_100


def test_no_gradient() -> None:
    finding = found(models.Detached(), (10,))["no-gradient-flows"]
    assert (finding.bytes, finding.layers) == (400, ("first",))


def test_pruned() -> None:
    model = nn.Sequential(nn.Linear(100, 50))
    prune.l1_unstructured(model[0], "weight", 0.5)
    # A float32 mask and the computed weight, 100·50·4 bytes each.
    assert found(model, (100,))["pruned-parameters-grow"].bytes == 2 * 20_000


def test_integers_cannot_be_halved() -> None:
    assert found(models.Tied(), "16:int64")["halving-leaves-integers"].bytes == 16 * 8


def test_parameters_dominate() -> None:
    finding = found(nn.Sequential(nn.Linear(1000, 1000)), (1000,))["parameters-dominate"]
    # 4,004,000 B of parameters; one sample keeps its 4,000 B input: 1,001 samples to reach them.
    assert finding.values["batch"] == 1_001
    assert finding.values["gain"] == 500


def test_training_peak() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False))
    finding = found(model, (1000,), train="adamw", scenarios="fp32")["training-peak"]
    # Parameters, gradients, two moments and the update's square roots, 4 MB each, and two cuBLAS workspaces.
    assert finding.values["states"] == 4 * 4_000_000
    assert "optimizer's update" in finding.text()
    assert "training-peak" not in found(model, (1000,), scenarios="fp32")


def test_the_peak_of_the_scenario_that_was_asked_for() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False))
    for name in ("bf16", "amp-bf16"):
        assert found(model, (1000,), train="adamw", scenarios=name)["training-peak"].values["name"] == name


def test_nothing_to_train() -> None:
    told = memsize.report(nn.Linear(4, 4).requires_grad_(False), (4,), train="adamw")
    reason = "no parameter of the model requires a gradient: there is nothing to train"
    assert [result.training for result in told.scenario_results] == [None] * len(told.scenario_results)
    assert {result.untrained for result in told.scenario_results if result.status == "run"} == {reason}
    assert "training-peak" not in {finding.code for finding in told.findings}
    # First of all, as the answer to what was asked; and once for all scenarios below the table.
    assert str(told).splitlines()[2] == f"There is no training step to show: {reason}."
    assert str(told).count(f": training: {reason}") == 1


def test_apex_o2_master_weights() -> None:
    finding = found(models.Small(), (3, 32, 32), batch_size=2, scenarios="apex-O2")["apex-o2-keeps-master-weights"]
    assert finding.bytes == 4 * (models_elements(models.Small()) - 16)
    assert finding.layers == ("norm",)


def models_elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_torchinfo_counts_tied_weights_twice_and_we_say_so() -> None:
    finding = found(models.Tied(), "16:int64").get("summary-counts-differently")
    assert finding is not None
    assert finding.values["theirs"] == 2 * 68_160


@pytest.mark.parametrize("build", [models.Small, models.Attention, models.Recurrent])
def test_every_finding_reads_as_a_sentence(build: Callable[[], nn.Module]) -> None:
    size = {models.Small: (3, 32, 32), models.Attention: (7, 64), models.Recurrent: (5, 16)}[build]  # type: ignore[index]
    for finding in memsize.report(build(), size, batch_size=2, scenarios="all").why():
        text = finding.text("B")
        assert text.endswith((".", ")"))
        assert "{" not in text
        assert "None" not in text


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**4), st.integers(0, 10**4), st.integers(1, 50))
def test_the_crossover_is_the_smallest_batch_that_keeps_less(a: int, b: int, p: int, q: int, start: int) -> None:
    def measure(batch: int) -> tuple[int, int]:
        return a + p * batch, b + q * batch

    crossing = find_crossover(measure, start)
    if q > p or (q == p and b >= a):
        assert crossing.batch is None
        return
    # The gap b - a + (q - p)·n falls below 0 just after n = (b - a) / (p - q).
    assert crossing.batch == (1 if q == p else max(1, (b - a) // (p - q) + 1))


def test_the_crossover_is_found_where_memory_is_stepwise() -> None:
    # The second keeps a constant 100 and rounds up to tens; the first keeps 8 per sample.
    crossing = find_crossover(lambda batch: (8 * batch, 100 + -(-batch // 10) * 10), 1)
    expected = next(n for n in range(1, 1000) if 100 + -(-n // 10) * 10 < 8 * n)
    assert crossing.batch == expected


@pytest.mark.parametrize(("more", "batch"), [(0, 11), (50, 16), (60, None), (-40, 7), (-50, None)])
def test_the_crossover_is_looked_for_near_the_line(more: int, batch: int | None) -> None:
    # From 1 and 2 the line 100 - 10·n falls below 0 at 11. From batch 3 on there are `more` bytes: at 11 + more/10.
    # It is found up to five sizes above the line and up to four below it, in six looks; farther off it is not.
    looked: list[int] = []

    def measure(n: int) -> tuple[int, int]:
        looked.append(n)
        return 10 * n, 100 + (more if n >= 3 else 0)

    assert find_crossover(measure, 1).batch == batch
    assert len(looked) == len(set(looked)) <= 2 + 6


def test_units() -> None:
    finding = Finding("x", "{a} of {b} in {c}", {"a": Bytes(2**20), "b": 12345, "c": ("p", "q", "r", "s")}, bytes=1)
    assert finding.text() == "1.00 MiB of 12,345 in p, q and 2 more"
    assert finding.text("B") == "1,048,576 B of 12,345 in p, q and 2 more"


def test_compare_half() -> None:
    before = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    after = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10)).half()
    comparison = memsize.diff(before, after)
    first, second = comparison.totals
    assert second.parameter_bytes * 2 == first.parameter_bytes
    unchanged = next(f for f in comparison.why() if f.code == "tensors-unchanged")
    assert "integers" in unchanged.text()
    assert unchanged.bytes == 8
    assert comparison.changes["changed"].sum() == 6


def test_in_a_notebook_they_are_pages() -> None:
    comparison = memsize.diff(nn.Linear(8, 8), nn.Linear(8, 8).half())
    page = comparison._repr_html_()
    for part in ("<table>", "before", "after", "288", "144", "(−50.0%)", "float16"):
        assert part in page
    assert repr(comparison.why()).startswith("1. Stored bytes: ")
    listed = comparison.why()._repr_html_()
    assert listed.count("<li>") == len(comparison.findings)
    assert "nothing to explain" in FindingList(())._repr_html_()
    assert "&lt;b&gt;" in FindingList([Finding("code", "<b>")])._repr_html_()


def test_golden_comparison() -> None:
    comparison = records.compared(records.toy(), records.toy("fp16", "float16"))
    check("comparison.html", comparison._repr_html_())
    check("comparison.txt", f"{comparison}\n")
    check("comparison.json", comparison.to_json())
    check("comparison.csv", render(comparison, "csv"))
    check("comparison.why.html", comparison.why()._repr_html_())


def test_compare_with_an_input_also_compares_what_is_kept() -> None:
    comparison = memsize.diff(nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8)).half(), (8,))
    assert "kept-for-backward-changed" in {finding.code for finding in comparison.why()}
    assert torch.float16.is_floating_point


def test_a_table_of_rules() -> None:
    rules, more = Rules[int](), Rules[int]()

    @rules.rule("even", "zero")
    def even(number: int) -> Iterator[Finding]:
        if number % 2 == 0:
            yield Finding("even" if number else "zero", "{number} is even.", bytes=number)

    @more.rule("large")
    def large(number: int) -> Iterator[Finding]:
        if number > 10:
            yield Finding("large", "{number} is large.", bytes=number)
            yield Finding("larger" if number > 100 else "large", "{number} is larger.", bytes=number)

    # In the order in which they are written, one table after the other; neither table gains the other's rules.
    both = more + rules
    assert both.codes == ("large", "even", "zero") and rules.codes == ("even", "zero")
    assert [finding.code for finding in both.findings(12)] == ["large", "large", "even"]
    assert [finding.code for finding in rules.findings(0)] == ["zero"]
    # A rule finds what it says; two may find the same.
    assert (both + rules).codes == both.codes
    with pytest.raises(ValueError, match="no rule says that it finds larger"):
        more.findings(101)
