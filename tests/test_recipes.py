"""How scenarios act on a copy of a model: what is cast, what comes in and out, which weights are copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memsize
from memsize.errors import ScenarioError
from tests.kernels import cuda_semantics
from tests.models import SCENARIOS, Kernel, Recipe, apply_scenario, floating_dtype, run_as

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))


def applied(scenario: str, model: nn.Module | None = None) -> Recipe:
    return apply_scenario((model or net()).to("meta"), SCENARIOS[scenario])


def dtypes(recipe: Recipe) -> list[torch.dtype]:
    """Of the first linear layer, of both norms' running means, and of the last linear layer."""
    first, norm, plain, last = recipe.model
    return [first.weight.dtype, norm.running_mean.dtype, plain.running_mean.dtype, last.weight.dtype]


@pytest.mark.parametrize(
    ("scenario", "stored", "floating", "out"),
    [
        ("fp32", [SINGLE] * 4, SINGLE, SINGLE),
        ("fp16", [HALF] * 4, HALF, HALF),
        ("bf16", [BRAIN] * 4, BRAIN, BRAIN),
        # apex gives float32 in and out; its second level keeps batch norms that have parameters
        ("apex-O1", [SINGLE] * 4, SINGLE, HALF),
        ("apex-O2", [HALF, SINGLE, HALF, HALF], SINGLE, SINGLE),
        ("apex-O3", [HALF] * 4, SINGLE, SINGLE),
        ("amp-fp16", [SINGLE] * 4, SINGLE, HALF),
        ("amp-bf16", [SINGLE] * 4, SINGLE, BRAIN),
    ],
)
def test_what_is_cast_and_what_comes_in_and_out(
    scenario: str, stored: list[torch.dtype], floating: torch.dtype, out: torch.dtype
) -> None:
    recipe = applied(scenario)
    assert dtypes(recipe) == stored
    assert recipe.floating == floating
    if not scenario.startswith(("amp", "apex-O1")):
        linear = nn.Sequential(nn.Linear(4, 2))
        assert applied(scenario, linear).model(torch.empty(3, 4, dtype=floating, device="meta")).dtype == out


def test_a_model_as_given_takes_inputs_in_its_own_dtype() -> None:
    assert applied("as-given", net().half()).floating == HALF
    assert applied("as-given", nn.ReLU()).floating is None
    assert floating_dtype(nn.Sequential(nn.Embedding(2, 2).double(), nn.Linear(2, 2))) == DOUBLE


@pytest.mark.parametrize(("scenario", "out"), [("fp16", HALF), ("apex-O2", SINGLE), ("apex-O3", SINGLE)])
def test_apex_returns_float32_whatever_comes_in(scenario: str, out: torch.dtype) -> None:
    copied = applied(scenario, nn.Sequential(nn.Linear(4, 2))).model
    assert copied(torch.empty(3, 4, dtype=HALF, device="meta")).dtype == out


def test_inputs_of_a_model_without_parameters_are_in_the_scenarios_dtype() -> None:
    assert applied("fp16", nn.ReLU()).floating == HALF
    assert applied("amp-fp16", nn.ReLU()).floating == SINGLE


@pytest.mark.parametrize(("scenario", "on"), [("fp32", False), ("fp16", False), ("amp-fp16", True), ("apex-O1", True)])
def test_which_scenarios_run_under_autocast(scenario: str, on: bool) -> None:
    with cuda_semantics(), applied(scenario).precision.autocast():
        assert torch.is_autocast_enabled("cuda") == on


def test_a_model_that_is_cast_in_part_is_cast_as_a_whole() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2))
    for model in (mixed, nn.Sequential(*reversed(mixed))):
        recipe = applied("fp16", model)
        assert {parameter.dtype for parameter in recipe.model.parameters()} == {HALF}
    norm = nn.Sequential(nn.BatchNorm1d(2).half())
    norm[0].running_mean = norm[0].running_mean.float()
    assert applied("fp16", norm).model[0].running_mean.dtype == HALF


def test_integer_buffers_are_not_cast() -> None:
    assert applied("fp16").model[1].num_batches_tracked.dtype == torch.int64
    assert applied("apex-O2").model[1].num_batches_tracked.dtype == torch.int64


def test_torch_ao_converts_from_float32_and_the_others_from_the_models_dtype() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(128, 4)).to(BRAIN)

    assert applied("int8-dynamic", model()).floating == SINGLE
    kept = applied("int4-weight", model())
    # 4 · 128 / 2 bytes, and a scale and a zero point of two bytes for the one group of each of 4 rows
    assert (kept.floating, kept.precision.sizes) == (BRAIN, {"0.weight": 256 + 8 + 8})
    assert kept.quantized is not None and kept.quantized.left == {}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Sequential(nn.LSTM(2, 2, bias=False)), "cannot convert LSTM '0': it has no bias"),
        (nn.Sequential(nn.LSTM(2, 3, proj_size=1)), "cannot convert LSTM '0': it has a projection"),
        (nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64)), "its weight is complex64"),
    ],
)
def test_what_torch_ao_cannot_convert(model: nn.Module, says: str) -> None:
    with pytest.raises(ScenarioError) as error:
        applied("int8-dynamic" if not isinstance(model[0], nn.Linear) else "int8-weight", model)
    assert says in str(error.value)


def running(kernel: Kernel, *, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """A linear layer with a frozen weight that runs by `kernel`, and a plain one with the same values."""
    torch.manual_seed(1)
    plain = nn.Linear(3, 2, bias=bias)
    plain.weight.requires_grad_(False)
    layer = nn.Linear(3, 2, bias=bias)
    layer.load_state_dict(plain.state_dict())
    layer.weight.requires_grad_(False)
    run_as(kernel, [layer])
    return layer, plain


def kept(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: found.append(tensor) or tensor, lambda tensor: tensor):
        layer(x).sum()
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kernel", ["copy kept", "copy freed", "quantized"])
def test_a_copy_of_the_weight_changes_no_value_and_no_gradient(kernel: Kernel, bias: bool) -> None:
    layer, plain = running(kernel, bias=bias)
    inputs = [torch.arange(12.0).reshape(2, 2, 3).requires_grad_() for _ in range(2)]
    for each, x in zip((layer, plain), inputs, strict=True):
        each(x).square().sum().backward()
    assert torch.equal(layer(inputs[0]), plain(inputs[0]))
    assert torch.allclose(inputs[0].grad, inputs[1].grad)
    if bias:
        assert torch.allclose(layer.bias.grad, plain.bias.grad)


def test_which_weight_is_kept_for_backward() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    for kernel, own in (("copy kept", False), ("copy freed", True), ("quantized", True)):
        layer, _ = running(kernel)  # type: ignore[arg-type]
        pointers = [tensor.data_ptr() for tensor in kept(layer, x)]
        assert (layer.weight.data_ptr() in pointers) == own, kernel


class Copies(TorchDispatchMode):
    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
        return func(*args, **(kwargs or {}))


def test_the_passing_copy_is_made_in_the_forward_and_again_in_the_backward() -> None:
    for kernel, forward, backward in (("copy freed", 1, 1), ("copy kept", 1, 0), ("quantized", 0, 0)):
        layer, _ = running(kernel)  # type: ignore[arg-type]
        with Copies() as copies:
            total = layer(torch.ones(8, 3, requires_grad=True)).sum()
            assert copies.made == forward
            total.backward()
        assert copies.made == forward + backward


def test_up_to_four_rows_are_multiplied_without_a_copy() -> None:
    """As `gemm_4bit` unpacks the weight in its kernel for a decode step."""
    layer, _ = running("copy freed")
    with Copies() as copies:
        layer(torch.ones(4, 3, requires_grad=True))
    assert copies.made == 0


def test_an_input_without_a_gradient_needs_no_second_copy() -> None:
    layer, _ = running("copy freed")
    layer(torch.ones(2, 3)).sum().backward()
    assert layer.bias.grad.tolist() == [2.0, 2.0]


def test_kernels_without_a_gradient_cut_it_off() -> None:
    layer, plain = running("no gradient")
    x = torch.ones(2, 3, requires_grad=True)
    assert not layer(x).requires_grad and plain(x).requires_grad


def test_only_linear_layers_run_by_copies() -> None:
    convolution, linear = nn.Conv1d(1, 1, 1), nn.Linear(1, 1)
    for kernel in ("copy kept", "copy freed", "quantized"):
        run_as(kernel, [convolution])  # type: ignore[arg-type]
        assert "forward" not in vars(convolution)
    run_as("quantized", [linear])
    assert "forward" not in vars(linear)
    run_as("no gradient", [convolution])
    assert "forward" in vars(convolution)


def test_an_int8_model_keeps_the_copies_that_a_real_step_keeps() -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)), torch.randn(8, 64)
    quantize_(model, Int8WeightOnlyConfig())
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x).sum().backward()
    # The second weight's scales, which are the model's own, GELU's input, and that weight in float32 for the gradient
    # of its input. The first input needs none.
    scales, activation, copy = 4 * 32, 4 * 8 * 128, 4 * 128 * 32
    assert sorted(saved.values()) == [scales, activation, copy]
    assert memsize.report(model, args=(x,), scenarios="as-given").baseline.saved_bytes == activation + copy
