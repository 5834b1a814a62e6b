"""Predictions are held to real steps on the CPU: every allocation of the suite's networks, made small.

What differs has a reason in `BY_DESIGN`, and which reasons apply to which network is said here.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vjp, vmap

from benchmarks import cpu_truth
from benchmarks.cpu_truth import (
    BY_DESIGN,
    GRAPHS,
    RUNS,
    SMALL,
    CpuComparison,
    EvenChoices,
    Run,
    compare_on_cpu,
    line,
    main,
)
from benchmarks.truth.suite import NETS
from memsize import Training
from tests.conftest import Python
from tests.known_values import constant_of
from tests.measurements import Experiment, OpLocation
from tests.models import MetaDispatchMode, inputs_from_specs, parse_inputs, scenario_named
from tests.records import Alignment, AllocationDifference

RECURRENT, NORMS, ATTENTION, DROPOUT = (reason.what for reason in BY_DESIGN)
QUICK = (
    "perceptron/train/amp-fp16/adamw:foreach",
    "perceptron/train/fp32/adamw:foreach/x4",
    "llama-1b/train/amp-bf16/adamw:foreach",
    "llama-1b-untied/train/bf16/adamw:fused",
    "llama-1b/train/bf16/adamw:foreach/own-attention",
    "mixture/train/fp32/adamw:foreach",
    "lstm/train/fp32/sgd:foreach",
    "gpt2/infer/bf16",
    "llama-1b/train/fp32/adamw:foreach/offload",
    "llama-1b/train/bf16/adamw:foreach/in-backward",
    "llama-1b/train/amp-bf16/adamw:foreach/first-block",
    *(name for name in RUNS if name.partition("/")[0] in GRAPHS),
)
"""Run with every suite: they take a second or two each. The others are slow."""


def expected(name: str) -> set[str]:
    """Why a network's step on the CPU is to differ: these reasons, and no other."""
    net, kind, scenario, *_ = name.split("/")
    if net in ("lstm", "gru"):
        return {RECURRENT}
    if name.endswith("own-attention"):
        return {ATTENTION, DROPOUT} if kind == "train" and net == "gpt2" else {ATTENTION}
    halved = scenario == "bf16" or (scenario == "apex-O2" and kind == "train")
    return {NORMS} if halved and net == "gpt2" else set()


@pytest.mark.thorough
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RUNS])
def test_a_real_step_is_as_predicted(name: str) -> None:
    found = compare_on_cpu(RUNS[name])
    assert found.unexplained == ()
    assert {reason.what for reason in found.reasons if reason} == expected(name)
    assert found.alignment.matched > 0
    if not expected(name):
        assert found.alignment.predicted == found.alignment.real == found.alignment.matched
        assert found.peak == 0
    if expected(name) == {RECURRENT}:
        # all but the reserve space and what the one call of backward has beside gradients is there
        assert found.alignment.predicted - found.alignment.matched <= 3


def test_every_network_of_the_suite_is_run() -> None:
    """But for three of the same code as others: larger, or with the adapters of another net."""
    again = {"wide-perceptron", "gpt2-large", "llama-1b-adapted"}
    assert {name.partition("/")[0] for name in RUNS} == {*NETS, *GRAPHS} - again
    assert set(SMALL) == set(NETS)


# -- what is not explained -------------------------------------------------------------------------------------------


class _Forgetful(nn.Module):
    """Makes something on a real device that no trace sees."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc(x)
        return y if x.is_meta else y + y.exp().mean()


def test_what_nobody_explains_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    feed = inputs_from_specs(parse_inputs(["8"]), 4)
    case = replace(RUNS["perceptron/infer/fp16"].make(), name="forgetful", model=_Forgetful(), inputs=feed)
    run = Run("forgetful", lambda: case, own=False)
    found = compare_on_cpu(run)
    # the exponentials, their mean and the sum: 4·8, 1 and 4·8 numbers of 2 bytes
    assert [(each.kind, each.place.op, each.real) for each in found.unexplained if each.kind == "real only"] == [
        ("real only", "exp", 64),
        ("real only", "mean", 2),
        ("real only", "add", 64),
    ]
    monkeypatch.setattr(cpu_truth, "RUNS", {"forgetful": run})
    assert main([]) == 1
    said = capsys.readouterr().out
    assert "exp" in said and "differences unexplained" in said and "0 differences" not in said


def test_a_reason_holds_where_it_is_meant_to() -> None:
    def differing(kind: str, layer: str | None, op: str) -> AllocationDifference:
        return AllocationDifference(kind, OpLocation("forward", layer, op), 8, 8, False)  # type: ignore[arg-type]

    kinds = {"": nn.Module, "layers": nn.LSTM, "head": nn.Linear}
    why = [cpu_truth._reason(differing("real only", layer, "mm"), kinds) for layer in ("layers", "head", None)]
    assert [reason and reason.what for reason in why] == [RECURRENT, None, None]
    # what a recurrent layer was given ends when it lets go of it; without such a layer nothing explains that
    later = differing("freed later", "head", "mm")
    assert cpu_truth._reason(later, kinds) is BY_DESIGN[0]
    assert cpu_truth._reason(later, {"": nn.Module, "head": nn.Linear}) is None
    attention = differing("predicted only", "head", "_scaled_dot_product_flash_attention_backward")
    assert cpu_truth._reason(attention, kinds) is BY_DESIGN[2]


def test_a_row_of_the_table() -> None:
    different = AllocationDifference("real only", OpLocation("forward", None, "mm"), None, 8, False)
    seen = Alignment(1200, 1201, 1199, (different, different, different))
    found = CpuComparison("net", seen, (BY_DESIGN[0], None, BY_DESIGN[0]), -16)
    assert line(found) == ["net", "1,200", "1,199", "2 recurrent layers, 1 unexplained", "-16 B"]


def test_choices_fall_as_they_are_assumed_to() -> None:
    with EvenChoices():
        chosen = torch.randn(12, 5).topk(2).indices
    with MetaDispatchMode():
        unknown = torch.empty(1 << 20, device="meta")[: 12 * 5].view(12, 5)  # small ones are taken to be zeros
        assumed = constant_of(unknown.topk(2).indices)
    assert assumed is not None and chosen.equal(assumed)


@pytest.mark.thorough
def test_the_command(warm_python: Python) -> None:
    done: subprocess.CompletedProcess[str] = warm_python("-m", "benchmarks.cpu_truth", "perceptron/infer/*")
    assert done.returncode == 0, done.stderr
    assert "| perceptron/infer/fp16 |" in done.stdout and "| none" in done.stdout
    assert done.stdout.rstrip().endswith("1 steps, 0 differences unexplained")


# -- gradients as functions --------------------------------------------------------------------------------------------


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))


class MetaLearner(nn.Module):
    """One inner step, through which the outer one differentiates (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = dict(self.net.named_parameters())
        grads = grad(lambda p: functional_call(self.net, p, (x,)).square().mean())(given)
        return functional_call(self.net, {name: p - 0.1 * grads[name] for name, p in given.items()}, (x,))


class PerSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return vmap(grad(lambda sample: self.net(sample).sum()))(x)


class Penalized(nn.Module):
    """An output that its own gradient is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, backward = vjp(self.net, x)
        return output + backward(torch.ones_like(output))[0].square().sum(1, keepdim=True)


@pytest.mark.parametrize("model", [MetaLearner, PerSample, Penalized])
def test_gradients_taken_in_a_forward_are_as_in_a_real_step(model: type[nn.Module]) -> None:
    inputs, training = inputs_from_specs(parse_inputs(["64"]), 8), Training("sgd:foreach")
    scenario = scenario_named("fp32")
    found = compare_on_cpu(Run("inner", lambda: Experiment("inner", model(), inputs, True, scenario, training), False))
    assert found.unexplained == ()
    assert found.alignment.predicted == found.alignment.real == found.alignment.matched > 20
    assert found.peak == 0
