"""What cuDNN takes for convolutions: what PyTorch asks it for, its answers, estimates, and what a run makes of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import memsize
from memsize import AllocatorConfig, Trace
from memsize.errors import InputError
from memsize.records.trace import Event
from memsize.units import dotted_cudnn
from tests.deep import cudnn_handle, cudnn_releases, installed_cudnn
from tests.gpus import card, cuda_context, estimate_gpu, is_estimated, replay, requests, variants
from tests.kernels import OLDEST, Convolution, ConvolutionWorkspaces, CudnnError, Library, Plan, Plans, estimate
from tests.measurements import Weightless
from tests.models import SCENARIOS, Ledger, Workspaces, inputs_from_data
from tests.workloads import Forward, Runner

A100, H100, T4, V100 = (8, 0), (9, 0), (7, 5), (7, 0)
MIB = 2**20

PLAIN = Convolution("forward", "float16", (8, 64, 56, 56), (128, 64, 3, 3), (8, 128, 56, 56), (1, 1), (1, 1), (1, 1))
"""3×3 over 64 channels of 56×56, 8 of them."""
OPERANDS = 2 * (8 * 64 * 56 * 56 + 128 * 64 * 9 + 8 * 128 * 56 * 56)


# -- a convolution as a value ------------------------------------------------------------------------------------------

sizes = st.integers(1, 512)
settings = st.lists(st.integers(0, 9), min_size=2, max_size=2).map(tuple)
shapes = st.lists(sizes, min_size=4, max_size=4).map(tuple)
convolutions = st.builds(
    Convolution,
    st.sampled_from(["forward", "data", "filter"]),
    st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    *[shapes] * 3,
    *[settings] * 3,
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@given(convolutions)
def test_a_convolution_comes_back_from_its_text(convolution: Convolution) -> None:
    assert Convolution.parse(str(convolution)) == convolution


def test_its_text_and_its_operands() -> None:
    assert str(PLAIN) == "forward float16 row-major 8,64,56,56 128,64,3,3 8,128,56,56 1,1 1,1 1,1 tf32"
    assert PLAIN.operands == OPERANDS == 9_781_248
    assert PLAIN._replace(dtype="float32").operands == 2 * OPERANDS
    assert PLAIN.groups == 1 and PLAIN._replace(w=(128, 4, 3, 3)).groups == 16


@pytest.mark.parametrize("text", ["", "forward", "backward float16 row-major 1 1 1 1 1 1", f"{PLAIN} fast", "x y z"])
def test_another_text_is_none(text: str) -> None:
    with pytest.raises(InputError, match="not a convolution"):
        Convolution.parse(text)


# -- what PyTorch asks cuDNN for ---------------------------------------------------------------------------------------


@dataclass
class Asked:
    """Plans that take down what they are asked, and answer with its position."""

    capability: tuple[int, int]
    convolutions: list[Convolution]
    wanted: str | None = None

    source = release = None

    def workspace(self, convolution: Convolution) -> int:
        self.convolutions.append(convolution)
        return 1000 * len(self.convolutions)

    def doubt(self, convolution: Convolution) -> int:
        return 0


def asked(
    module: nn.Module, *shape: int, dtype: torch.dtype = torch.float32, last: bool = False, gpu: tuple[int, int] = A100
) -> list[Convolution]:
    """What one forward and backward of `module` ask for."""
    plans = Asked(gpu, [])
    module = module.to("meta", dtype)
    x = torch.empty(shape, device="meta", dtype=dtype, requires_grad=True)
    with Ledger(workspaces=Workspaces(convolutions=ConvolutionWorkspaces(plans))):  # type: ignore[arg-type]
        if last:
            module, x = module.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        y: Tensor = module(x)
        y.backward(torch.empty_like(y), inputs=[x, *module.parameters()])
    return plans.convolutions


def test_a_step_asks_for_three() -> None:
    found = asked(nn.Conv2d(64, 128, 3, stride=2, padding=(1, 0), dilation=(1, 2)), 8, 64, 57, 61)
    # (57 + 2 - 2 - 1) // 2 + 1 = 29, (61 - 4 - 1) // 2 + 1 = 29
    forward = Convolution(
        "forward", "float32", (8, 64, 57, 61), (128, 64, 3, 3), (8, 128, 29, 29), (1, 0), (2, 2), (1, 2)
    )
    assert found == [forward, forward._replace(operation="data"), forward._replace(operation="filter")]


def test_a_frozen_weight_or_input_asks_for_less() -> None:
    plans = Asked(A100, [])
    layer = nn.Conv2d(8, 8, 3).to("meta")
    layer.weight.requires_grad_(False)
    x = torch.empty(2, 8, 9, 9, device="meta", requires_grad=True)
    with Ledger(workspaces=Workspaces(convolutions=ConvolutionWorkspaces(plans))):  # type: ignore[arg-type]
        layer(x).sum().backward()
    assert [each.operation for each in plans.convolutions] == ["forward", "data"]


# One sample's patches: 8 channels of 3 x 3 pixels for 5 x 5 results, of 1 x 5 for 9, or of one pixel
@pytest.mark.parametrize(
    ("layer", "shape", "columns"),
    [
        (lambda: nn.Conv2d(8, 16, 3, stride=2, padding=1), (4, 8, 9, 9), 2 * 8 * 9 * 25),
        (lambda: nn.Conv1d(8, 16, 5, padding=2), (4, 8, 9), 2 * 8 * 5 * 9),
        (lambda: nn.Conv2d(8, 16, 1), (4, 8, 9, 9), 2 * 8 * 81),
        (lambda: nn.Conv2d(8, 16, 1, stride=2), (4, 8, 9, 9), 2 * 8 * 25),
        (lambda: nn.Conv2d(8, 16, 3, dilation=2), (4, 8, 9, 9), 2 * 8 * 9 * 25),
        (lambda: nn.Conv3d(8, 16, 3), (4, 8, 9, 9, 9), 2 * 8 * 27 * 7**3),
        # Transposed, the patches are those of the output, 16 channels, at each place of the input.
        (lambda: nn.ConvTranspose2d(8, 16, 3), (4, 8, 9, 9), 2 * 16 * 9 * 81),
        (lambda: nn.ConvTranspose3d(8, 16, 2, stride=2), (4, 8, 5, 5, 5), 2 * 16 * 8 * 125),
        # Groups: patches of one and copies of its part of input and weight, or the results that are joined.
        (lambda: nn.Conv2d(8, 4, 3, groups=2), (4, 8, 9, 9), 2 * (4 * 9 * 49 + (4 * 8 * 81 + 4 * 4 * 9) // 2)),
        (lambda: nn.Conv2d(2, 64, 1, groups=2), (4, 2, 9, 9), 2 * 4 * 64 * 81),
        (lambda: nn.Conv3d(8, 16, 3, groups=8), (4, 8, 9, 9, 9), 0),
    ],
)
def test_what_cudnn_does_not_take_is_unfolded(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], columns: int
) -> None:
    """A T4 has no bfloat16 in cuDNN: forward and backward unfold one sample at a time (ConvolutionMM2d.cu,
    NaiveDilatedConvolution.cu, NaiveConvolutionTranspose3d.cu).
    """
    module = layer().to("meta", torch.bfloat16)
    x = torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)
    ledger = Ledger(workspaces=Workspaces(convolutions=ConvolutionWorkspaces(Asked((7, 5), []))))  # type: ignore[arg-type]
    with ledger:
        y: Tensor = module(x)
        y.backward(torch.empty_like(y))
    taken = [each.bytes for each in ledger.storages(frozenset()) if each.role == "temporary"]
    ledger.close()
    # Of its own: the output, the gradients and the columns of each, and no two of them are of equal size here
    assert taken.count(columns) == 2 * (columns > 0)


@pytest.mark.parametrize(
    ("release", "cudnn", "dtype", "last", "kernel", "is_cudnn"),
    [
        ((2, 8), "9.10.2", torch.bfloat16, False, 3, True),
        ((2, 9), "9.10.2", torch.bfloat16, False, 3, False),
        ((2, 10), "9.10.2", torch.float16, False, (1, 3, 3), False),
        ((2, 9), "9.10.2", torch.bfloat16, False, 1, True),
        ((2, 9), "9.10.2", torch.bfloat16, True, 3, True),
        ((2, 9), "9.10.2", torch.float32, False, 3, True),
        ((2, 9), "9.15.1", torch.bfloat16, False, 3, True),
        ((2, 9), "9.7.1", torch.bfloat16, False, 3, True),
        ((2, 13), None, torch.bfloat16, False, 3, True),
    ],
)
def test_volumes_in_half_precision_are_kept_from_cudnn_that_computes_them_wrongly(
    release: tuple[int, int], cudnn: str | None, dtype: torch.dtype, last: bool, kernel: Any, is_cudnn: bool
) -> None:
    """PyTorch 2.9 with cuDNN 9.8 to 9.14 (pytorch/pytorch#163539, #166643)."""
    found: list[Convolution] = []
    convolutions = ConvolutionWorkspaces(Asked(A100, found, wanted=cudnn), pytorch=release)  # type: ignore[arg-type]
    layer, x = nn.Conv3d(4, 8, kernel).to("meta", dtype), torch.empty(2, 4, 9, 9, 9, device="meta", dtype=dtype)
    if last:
        x = x.to(memory_format=torch.channels_last_3d)
    with Ledger(workspaces=Workspaces(convolutions=convolutions)):
        layer(x)
    assert bool(found) is is_cudnn
    assert any("channels_last_3d" in note for note in convolutions.distrusted) is not is_cudnn


def test_depthwise_volumes_are_not_unfolded() -> None:
    """They have a kernel of their own with any cuDNN (`use_cudnn_depthwise`), of which no note is to be made."""
    convolutions = ConvolutionWorkspaces(Asked(A100, [], wanted="9.10.2"), pytorch=(2, 9))  # type: ignore[arg-type]
    layer, x = nn.Conv3d(4, 4, 3, groups=4).to("meta").half(), torch.empty(2, 4, 9, 9, 9, device="meta").half()
    ledger = Ledger(workspaces=Workspaces(convolutions=convolutions))
    with ledger, torch.no_grad():
        layer(x)
    assert not convolutions.distrusted and not convolutions.met
    ledger.close()


@pytest.mark.parametrize(("cudnn", "is_cudnn"), [("8.9.2", False), ("9.1.0", False), ("9.5.1", True), (None, True)])
@pytest.mark.parametrize(
    ("layer", "shape", "patches"),
    [
        # pytorch/pytorch#132300: 2.99·10⁹ numbers in the output, and 9.26 GB at the peak with these patches
        ((3, 128, 1, torch.bfloat16), (24, 740, 1316), 3_786_289_920),
        # pytorch/pytorch#136479, "Tried to allocate 108.00 GiB": 2³¹ numbers
        ((128, 128, 1, torch.float16), (256, 256, 256), 108 * 2**30),
        # pytorch/pytorch#128947, "Tried to allocate 161.37 GiB": 2.68·10⁹ in the input
        ((256, 64, 0, torch.float32), (5, 1090, 1922), 173_266_698_240),
    ],
)
def test_samples_that_need_64_bit_indices_are_kept_from_old_cudnn(
    layer: tuple[int, int, int, torch.dtype], shape: tuple[int, ...], patches: int, cudnn: str | None, is_cudnn: bool
) -> None:
    channels, outputs, padding, dtype = layer
    found: list[Convolution] = []
    convolutions = ConvolutionWorkspaces(Asked(A100, found, wanted=cudnn))  # type: ignore[arg-type]
    module = nn.Conv3d(channels, outputs, 3, padding=padding).to("meta", dtype)
    ledger = Ledger(workspaces=Workspaces(convolutions=convolutions))
    with ledger, torch.no_grad():
        module(torch.empty(1, channels, *shape, device="meta", dtype=dtype))
    taken = [each.bytes for each in ledger.storages(frozenset()) if each.role == "temporary"]
    ledger.close()
    assert bool(found) is is_cudnn
    assert taken.count(patches) == (not is_cudnn)
    assert any("2³¹" in note for note in convolutions.distrusted) is not is_cudnn


def test_the_patches_of_a_backward_stay_until_the_weights_gradient_is_there() -> None:
    """ConvolutionMM2d.cu, `slow_conv2d_backward_out_cuda`: one buffer for both gradients, the bias's between them."""
    layer, x = nn.Conv2d(4, 8, 3).to("meta", torch.bfloat16), torch.empty(2, 4, 8, 8, device="meta").bfloat16()
    found = events_of(layer, x.requires_grad_(), Asked(T4, []))
    output, data, weight, bias = 2 * 2 * 8 * 6 * 6, 2 * 2 * 4 * 8 * 8, 2 * 8 * 4 * 9, 2 * 8
    columns = 2 * 4 * 9 * 36
    assert [delta for _, delta in found[:3]] == [output, columns, -columns]
    assert [delta for _, delta in found[4:9]] == [data, columns, bias, weight, -columns]


def test_a_transposed_one_is_the_gradient_of_another() -> None:
    found = asked(nn.ConvTranspose2d(32, 16, 2, stride=2), 4, 32, 10, 10)
    # its output is that convolution's input
    data = Convolution("data", "float32", (4, 16, 20, 20), (32, 16, 2, 2), (4, 32, 10, 10), (0, 0), (2, 2), (1, 1))
    assert found == [data, data._replace(operation="forward"), data._replace(operation="filter")]


def test_a_line_is_a_picture_of_height_one() -> None:
    found = asked(nn.Conv1d(16, 32, 5, padding=2, stride=2), 4, 16, 100)
    assert found[0] == Convolution(
        "forward", "float32", (4, 16, 1, 100), (32, 16, 1, 5), (4, 32, 1, 50), (0, 2), (1, 2), (1, 1)
    )


def test_a_volume() -> None:
    found = asked(nn.Conv3d(4, 8, 3, padding="same"), 2, 4, 6, 7, 8)
    assert found[0].x == (2, 4, 6, 7, 8) and found[0].padding == (1, 1, 1)


def test_channels_last_and_dtypes() -> None:
    found = asked(nn.Conv2d(8, 8, 3), 2, 8, 9, 9, dtype=torch.bfloat16, last=True)
    assert {(each.channels_last, each.dtype) for each in found} == {(True, "bfloat16")}
    # cuDNN has no channels last for float64
    found = asked(nn.Conv2d(8, 8, 3), 2, 8, 9, 9, dtype=torch.float64, last=True)
    assert {(each.channels_last, each.dtype) for each in found} == {(False, "float64")}


@pytest.mark.parametrize(
    ("dtype", "last", "shape", "count"),
    [
        # float32 has kernels of PyTorch's own; channels last has none
        (torch.float32, False, (2, 64, 14, 14), 0),
        (torch.float32, True, (2, 64, 14, 14), 3),
        # float16 goes to cuDNN where that was found faster: any stride 1 from a width of 7 on
        (torch.float16, False, (2, 64, 14, 14), 3),
        (torch.float16, False, (2, 64, 6, 6), 0),
        (torch.bfloat16, False, (2, 64, 14, 14), 0),
    ],
)
def test_depthwise(dtype: torch.dtype, last: bool, shape: tuple[int, ...], count: int) -> None:
    layer = nn.Conv2d(64, 64, 3, padding=1, groups=64)
    assert len(asked(layer, *shape, dtype=dtype, last=last)) == count


@pytest.mark.parametrize(
    ("layer", "batch", "count"),
    [
        # stride 2 on 128 channels of 14: only one sample at a time
        (nn.Conv2d(128, 128, 3, stride=2, groups=128), 1, 3),
        (nn.Conv2d(128, 128, 3, stride=2, groups=128), 2, 0),
        (nn.Conv2d(512, 512, 3, stride=2, groups=512), 2, 3),
        (nn.Conv2d(128, 128, 3, stride=3, groups=128), 1, 0),
        (nn.Conv2d(128, 128, (3, 5), groups=128), 1, 0),
        (nn.Conv2d(128, 128, 7, groups=128), 1, 0),
        (nn.Conv2d(128, 128, 3, dilation=2, groups=128), 1, 0),
        (nn.Conv2d(16, 16, 3, groups=16), 1, 0),
    ],
)
def test_depthwise_in_float16(layer: nn.Conv2d, batch: int, count: int) -> None:
    assert len(asked(layer, batch, layer.in_channels, 14, 14, dtype=torch.float16)) == count


def test_a_depthwise_line_in_float16_is_cudnns() -> None:
    assert len(asked(nn.Conv1d(64, 64, 9, groups=64), 2, 64, 50, dtype=torch.float16)) == 3


def test_what_cudnn_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(nn.Conv2d(8, 8, 3), 2, 8, 9, 9, dtype=torch.bfloat16, gpu=T4) == []
    assert asked(nn.Conv2d(8, 8, 3), 0, 8, 9, 9) == []
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert asked(nn.Conv2d(8, 8, 3), 2, 8, 9, 9) == []


def test_settings_of_pytorch_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    unusual = (not torch.backends.cudnn.deterministic, not torch.backends.cudnn.allow_tf32)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", unusual[0])
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", unusual[1])
    found = asked(nn.Conv2d(8, 8, 3), 2, 8, 9, 9)
    assert {(each.deterministic, each.tf32) for each in found} == {unusual}
    # cuDNN has no deterministic dilated ones for row-major tensors
    assert asked(nn.Conv2d(8, 8, 3, dilation=2), 2, 8, 9, 9) == []


def test_a_program_changes_settings_when_it_wants() -> None:
    plans = Asked(A100, [])
    layer = nn.Conv2d(8, 8, 3).to("meta")
    x = torch.empty(2, 8, 9, 9, device="meta")
    with Ledger(workspaces=Workspaces(convolutions=ConvolutionWorkspaces(plans))):  # type: ignore[arg-type]
        layer(x)
        with torch.backends.cudnn.flags(enabled=False):
            layer(x)
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            layer(x)
    assert [(each.deterministic, each.tf32) for each in plans.convolutions] == [(False, True), (True, False)]


def test_deterministic_algorithms_are_those_of_convolutions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert {each.deterministic for each in asked(nn.Conv2d(8, 8, 3), 2, 8, 9, 9)} == {True}


def test_the_precision_of_convolutions_is_read_apart_from_that_of_recurrent_layers() -> None:
    """`cudnn.allow_tf32` raises where they differ."""
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision
    conv.fp32_precision = "ieee"
    try:
        assert {each.tf32 for each in asked(nn.Conv2d(8, 8, 3), 2, 8, 9, 9)} == {False}
    finally:
        conv.fp32_precision = before


# -- what a run makes of it --------------------------------------------------------------------------------------------


def events_of(module: nn.Module, x: Tensor, plans: Any) -> list[tuple[str, int]]:
    """Role and bytes of each event of a forward and backward of `module`."""
    ledger = Ledger(workspaces=Workspaces(convolutions=ConvolutionWorkspaces(plans)))
    with ledger:
        y = module(x)
        gradient = torch.empty_like(y)
        start = len(ledger.events)
        # both gradients: the input's is read, the weight's is kept
        torch.autograd.grad(y, [x, *module.parameters()], gradient)
    return [
        (ledger.rows[event.storage].role, event.delta) for event in (*ledger.events[:start], *ledger.events[start:])
    ]


def test_each_gradient_is_followed_by_its_workspace() -> None:
    layer = nn.Conv2d(4, 8, 3, bias=False).to("meta")
    x = torch.empty(2, 4, 8, 8, device="meta", requires_grad=True)
    found = events_of(layer, x, Asked(A100, []))
    output, data, weight = 4 * 2 * 8 * 6 * 6, 4 * 2 * 4 * 8 * 8, 4 * 8 * 4 * 9
    sizes = [size for _, size in found]
    assert sizes[:3] == [output, 1000, -1000]
    assert sizes[4:10] == [data, 2000, -2000, weight, 3000, -3000]  # after the gradient that the backward is given
    assert [role for role, size in found if abs(size) in (1000, 2000, 3000)] == ["workspace"] * 6


def test_operands_are_rearranged_before_the_workspace_is_taken() -> None:
    layer = nn.Conv2d(4, 8, 3, bias=False).to("meta")
    x = torch.empty(2, 8, 8, 4, device="meta").permute(0, 3, 2, 1).requires_grad_()  # neither format
    copied = 4 * 2 * 4 * 8 * 8
    sizes = [size for _, size in events_of(layer, x, Asked(A100, []))]
    assert sizes[:5] == [copied, 4 * 2 * 8 * 6 * 6, 1000, -1000, -copied]


def conv_trace(gpu: str = "a100", **options: Any) -> Trace:
    with Weightless():
        model = nn.Sequential(nn.Conv2d(64, 128, 3, padding=1, bias=False))
    found: Trace = memsize.trace(
        model, (64, 56, 56), batch_size=8, scenario="fp16", optimizer=None, gpu=gpu, **options
    ).trace
    return found


def test_an_inference_with_an_estimate() -> None:
    trace = conv_trace()
    assert trace.cudnn is None and is_estimated(trace)
    assert [event.delta for event in trace.events][-3:] == [2 * 8 * 128 * 56 * 56, OPERANDS, -OPERANDS]
    look = estimate_gpu(trace)
    assert look.requested == OPERANDS + OPERANDS
    assert look.roles["workspace"] == OPERANDS
    config, segments = AllocatorConfig(), []
    for factor in (0, 1, 2):
        assert sum(size for _, size in requests(trace, factor) if size > 0) == (1 + factor) * OPERANDS
        segments.append(replay(requests(trace, factor), config).reserved.bytes)
    assert look.reserved == segments[1]
    outside = cuda_context(ops={"convolution"})
    assert (look.device.low, look.device.high) == (segments[0] + outside.low, segments[2] + outside.high)


def test_what_cudnn_said_leaves_no_interval() -> None:
    trace = replace(conv_trace(), cudnn="9.24.0")
    assert not is_estimated(trace) and len(variants(trace)) == 1
    look = estimate_gpu(trace)
    outside = cuda_context(ops={"convolution"})
    assert look.device.high - look.device.low == outside.high - outside.low


def test_a_run_without_convolutions_is_no_estimate() -> None:
    trace = memsize.trace(nn.Linear(8, 8), (8,), optimizer=None).trace
    assert trace.cudnn is None and not is_estimated(trace)
    # cuBLAS's workspace is no convolution's
    assert any(event.delta > MIB for event in trace.events)
    assert list(requests(trace, 0)) == list(requests(trace))


def test_a_report_without_peaks_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Plans | None] = []
    real = Runner.__init__
    monkeypatch.setattr(
        Runner, "__init__", lambda self, *rest, **named: (real(self, *rest, **named), seen.append(self.plans))[0]
    )
    model = nn.Sequential(nn.Conv2d(8, 8, 3))
    memsize.report(model, (8, 9, 9))
    memsize.report(model, (8, 9, 9), gpu="t4")
    memsize.report(model, (8, 9, 9), train="sgd")
    assert [plans and plans.capability for plans in seen] == [None, T4, A100]


def test_workspaces_without_events() -> None:
    """A trace by hand, whose convolution takes none."""
    trace = replace(conv_trace(), storages=(), events=())
    assert list(requests(trace, 2)) == [] and not is_estimated(trace)
    assert Event(0, 1, 0, 0, "convolution") not in trace.events


# -- estimates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "gpu", "expected"),
    [
        ({}, A100, OPERANDS),
        ({"operation": "data"}, H100, OPERANDS),
        ({"operation": "filter"}, T4, OPERANDS),
        # tensor cores for float32 came with Ampere, and are PyTorch's default for convolutions
        ({"dtype": "float32"}, H100, 2 * OPERANDS),
        ({"dtype": "float32"}, T4, 0),
        ({"dtype": "float32", "tf32": False}, H100, 0),
        ({"dtype": "float64"}, H100, 0),
        ({}, V100, 0),
        # nothing to rearrange
        ({"channels_last": True}, A100, 0),
        ({"channels_last": True, "dtype": "float32"}, H100, 0),
        ({"channels_last": True, "dtype": "float32"}, A100, 2 * OPERANDS),
        # depthwise, and the three channels of a picture
        ({"w": (64, 1, 3, 3)}, A100, 0),
        ({"x": (8, 3, 56, 56), "w": (128, 3, 3, 3)}, A100, 0),
    ],
)
def test_estimates(change: dict[str, Any], gpu: tuple[int, int], expected: int) -> None:
    assert estimate(PLAIN._replace(**change), gpu) == expected


# -- who is asked ------------------------------------------------------------------------------------------------------


class Answering:
    """A library that has two plans for everything on the cards that it knows."""

    def __init__(self, release: str = "9.99.0") -> None:
        self.asked = 0
        self.release = release

    def __str__(self) -> str:
        return self.release

    def plan(self, convolution: Convolution, gpu: tuple[int, int]) -> Plan | None:
        self.asked += 1
        if gpu > (12, 1):
            raise CudnnError("not known")
        return None if convolution.dtype == "float64" else Plan(700, frozenset())

    def plans(self, convolution: Convolution, gpu: tuple[int, int]) -> tuple[Plan, ...]:
        return tuple(filter(None, (self.plan(convolution, gpu), Plan(900, frozenset()))))


def test_benchmark_tries_all_plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two calls of a convolution allocates the largest workspace (900), the second that of its plan."""
    monkeypatch.setattr("memsize.kernels.cudnn.installed.installed", lambda wanted: Answering())

    def taken(benchmark: bool, stack: str = "") -> list[int]:
        layer = nn.Conv2d(64, 64, 1, bias=False).to("meta")
        options: dict[str, Any] = {"scenario": "as-given", "optimizer": None, "gpu": "a100", "stack": stack}
        with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark):
            trace = memsize.trace(nn.Sequential(layer, layer), (64, 8, 8), **options).trace
        return [storage.bytes for storage in trace.storages if storage.role == "workspace"]

    assert taken(False) == taken(True, "benchmark=off") == [700, 700]
    assert taken(True) == taken(False, "benchmark=on") == [900, 700]
    with pytest.raises(InputError, match="cuDNN's benchmark is on or off, not true"):
        taken(False, "benchmark=true")


def test_the_library_is_asked_once() -> None:
    library = Answering()
    plans = Plans(A100, lambda: library)  # type: ignore[arg-type, return-value]
    assert plans.source(plans.answers) is None
    assert [plans.workspace(PLAIN) for _ in range(3)] == [700] * 3
    assert library.asked == 1 and plans.source(plans.answers) == "9.99.0" and not plans.estimated
    assert plans.workspace(PLAIN._replace(dtype="float64")) == 0


def test_the_greediest_plan() -> None:
    assert Plans(A100, Answering, greedy=True).workspace(PLAIN) == 900  # type: ignore[arg-type]
    assert Plans(A100, greedy=True).workspace(PLAIN) == 3 * OPERANDS


def test_what_is_recorded_comes_first() -> None:
    plans = Plans(A100, Answering, recorded={PLAIN: 5})  # type: ignore[arg-type]
    assert plans.workspace(PLAIN) == 5
    assert plans.workspace(PLAIN._replace(operation="data")) == 700
    alone = Plans(A100, recorded={PLAIN: 5}, release="9.1.0")
    assert alone.workspace(PLAIN) == 5 and alone.source(alone.answers) == "9.1.0"
    assert alone.workspace(PLAIN._replace(operation="data")) == OPERANDS and alone.source(alone.answers) is None


def test_an_unknown_card_is_estimated() -> None:
    library = Answering()
    plans = Plans((15, 0), lambda: library)  # type: ignore[arg-type, return-value]
    other = PLAIN._replace(operation="filter")
    assert plans.workspace(PLAIN) == plans.workspace(other) == OPERANDS
    assert plans.estimated == {PLAIN, other} and plans.source(plans.answers) is None
    plans = Plans((15, 0), lambda: library)  # type: ignore[arg-type, return-value]
    plans.workspace(PLAIN), plans.workspace(PLAIN)
    assert library.asked == 3  # once each


def test_which_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "libcudnn.so.9"
    file.write_bytes(b"no library")
    assert installed_cudnn() is None  # as the tests are set up
    monkeypatch.setenv("MEMSIZE_CUDNN", str(file))
    assert installed_cudnn() is None
    monkeypatch.setenv("MEMSIZE_CUDNN", "libm.so.6")
    assert installed_cudnn() is None
    monkeypatch.delenv("MEMSIZE_CUDNN")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    tried: list[str] = []

    def missing(path: str) -> None:
        tried.append(path)
        raise OSError

    # The system's own is looked for by the loader: to ask a compiler would start processes.
    monkeypatch.setattr("memsize.kernels.cudnn.plans.Backend", missing)
    monkeypatch.delattr("subprocess.Popen")
    assert installed_cudnn() is None and tried == ["libcudnn.so.9"]


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three releases, as pip and NVIDIA's archive lay them out; each opens as the path it has."""
    for release, inside in (("9.15.1", "nvidia/cudnn"), ("9.24.0", "nvidia/cudnn"), ("9.19.0", "")):
        root = tmp_path / release / inside
        for folder in ("lib", "include"):
            (root / folder).mkdir(parents=True)
        (root / "lib" / "libcudnn.so.9").touch()
        names = zip(("MAJOR", "MINOR", "PATCHLEVEL"), release.split("."), strict=True)
        header = "".join(f"#define CUDNN_{name} {number}\n" for name, number in names)
        (root / "include" / "cudnn_version.h").write_text(header)
    monkeypatch.setenv("MEMSIZE_CUDNN", str(tmp_path))
    for name in ("Library", "SeparateLibrary"):
        monkeypatch.setattr(f"memsize.kernels.cudnn.installed.{name}", lambda path, name=name: (name, path))
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "folder"),
    [("9.24", "9.24.0"), ("9.15.0", "9.15.1"), ("9.19.0", "9.19.0"), (None, "9.24.0"), ("9.1.0", "9.24.0")],
)
def test_the_release_of_the_stack_is_asked(releases: Path, wanted: str | None, folder: str) -> None:
    kind, path = installed_cudnn(wanted)
    assert kind == "Library" and Path(path).relative_to(releases).parts[0] == folder


def test_a_second_release_gets_a_process_of_its_own(releases: Path) -> None:
    installed_cudnn("9.24")
    assert cudnn_releases.installed("9.24")[0] == "Library"  # type: ignore[index]
    assert cudnn_releases.installed("9.19")[0] == "SeparateLibrary"  # type: ignore[index]


def test_folders_and_files_are_listed(releases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = releases / "9.15.1", releases / "9.19.0" / "lib" / "libcudnn.so.9"
    monkeypatch.setenv("MEMSIZE_CUDNN", f"{one}:{other}")
    assert installed_cudnn("9.19")[1] == str(other)
    assert installed_cudnn("9.15")[1] == str(one / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9")


def test_a_process_answers_as_the_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        def __init__(self, path: str) -> None:
            if path == "old":
                raise CudnnError("too old")

        def __str__(self) -> str:
            return "9.19.0"

        def plan(self, convolution: Convolution, capability: tuple[int, int]) -> Plan | None:
            if capability == (15, 0):
                raise CudnnError("does not know it")
            return Plan(convolution.operands, frozenset({4, 1})) if convolution == PLAIN else None

        def plans(self, convolution: Convolution, capability: tuple[int, int]) -> tuple[Plan, ...]:
            return Plan(1, frozenset()), Plan(capability[0], frozenset({0}))

    for name in ("Library", "HandleLibrary"):
        monkeypatch.setattr(f"memsize.kernels.cudnn.installed.{name}", Known)
    other = PLAIN._replace(operation="data")
    asked = [("plan", PLAIN, A100), ("plan", other, A100), ("plans", PLAIN, T4), ("plan", PLAIN, (15, 0))]
    questions = StringIO("".join(json.dumps((name, str(c), gpu)) + "\n" for name, c, gpu in asked))
    answers = StringIO()
    cudnn_releases.serve("new", questions, answers)
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [
        ["9.19.0"],
        [[OPERANDS, [1, 4]]],
        [],
        [[1, []], [7, [0]]],
        {"error": "does not know it"},
    ]
    cudnn_releases.serve("old", StringIO(), answers := StringIO())
    assert json.loads(answers.getvalue()) == {"error": "too old"}


def test_a_process_whose_library_does_not_load() -> None:
    with pytest.raises(CudnnError, match="cannot open shared object"):
        cudnn_releases.SeparateLibrary("/nowhere/libcudnn.so.9")


def test_a_program_that_is_simulated_does_not_count_the_process() -> None:
    with memsize.virtual_gpu("A100") as region, pytest.raises(CudnnError, match="cannot open shared object"):
        cudnn_releases.SeparateLibrary("/nowhere/libcudnn.so.9")
    assert not region.run.children


def test_the_answers_of_another_release_are_estimates() -> None:
    for wanted, source in (("9.99", "9.99.0"), (None, "9.99.0"), ("9.1.0", None)):
        plans = Plans(A100, Answering, wanted=wanted)  # type: ignore[arg-type]
        assert plans.workspace(PLAIN) == 700
        assert plans.source(plans.answers) == source and plans.release == "9.99.0"


def test_a_stack_that_has_another_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peaks are intervals around what the installed one says, and a note names both."""
    monkeypatch.setattr("memsize.kernels.cudnn.installed.installed", lambda wanted: Answering())
    trace = conv_trace(gpu="a100", stack="torch=2.6")
    assert trace.cudnn is None and is_estimated(trace)
    assert any("cuDNN 9.99.0 was asked, the stack has 9.1.0" in note for note in trace.notes)
    trace = conv_trace(gpu="a100", stack="torch=2.6,cudnn=9.99")
    assert trace.cudnn == "9.99.0" and not is_estimated(trace)


POINTWISE = PLAIN._replace(w=(128, 64, 1, 1), padding=(0, 0))


@pytest.mark.parametrize(
    ("convolution", "expected"),
    [
        (PLAIN, 0),
        (PLAIN._replace(operation="filter"), 0),
        (PLAIN._replace(w=(128, 64, 1, 3), operation="filter"), 0),  # one pixel high alone
        (POINTWISE, 1),
        (POINTWISE._replace(operation="data"), 1),
        (POINTWISE._replace(operation="filter"), 2),
        (POINTWISE._replace(operation="filter", stride=(2, 2)), 1),
        (PLAIN._replace(stride=(1, 2)), 1),
    ],
)
def test_which_plans_are_in_doubt(convolution: Convolution, expected: int) -> None:
    """Only those of a release that was asked by a handle, and not those that a real run recorded."""
    for release, doubt in (("9.1.0", expected), ("9.10.2", expected), ("9.11.0", 0), ("9.24.0", 0)):
        plans = Plans(A100, partial(Answering, release))  # type: ignore[arg-type]
        assert plans.workspace(convolution) == 700 and plans.doubt(convolution) == doubt
    recorded = Plans(A100, recorded={convolution: 5}, release="9.1.0")
    assert recorded.workspace(convolution) == 5 and recorded.doubt(convolution) == 0


def test_the_peaks_of_plans_in_doubt_are_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weight's gradient (2), the others of a 1×1 kernel (1): without and twice as much, of both or of the first."""
    monkeypatch.setattr("memsize.kernels.cudnn.installed.installed", lambda wanted: Answering("9.1.0"))
    layers = nn.Conv2d(8, 8, 3, bias=False), nn.Conv2d(8, 8, 1, bias=False)
    trace = memsize.trace(nn.Sequential(*layers), (8, 9, 9), optimizer="sgd", gpu="a100", stack="torch=2.6").trace
    doubts = [
        storage.doubt for storage in trace.storages if storage.op.startswith("convolution") and storage.bytes == 700
    ]
    assert doubts[:5] == [0, 1, 1, 2, 0] and not is_estimated(trace) and trace.cudnn == "9.1.0"
    assert any("with 1×1 kernels and strides it may take none, or twice as much" in note for note in trace.notes)
    expected = [(1, 0), (0, 1), (2, 1), (0, 2), (2, 2)]
    assert list(map(list, variants(trace))) == [list(requests(trace, *change)) for change in expected]
    taken = [sum(size == change * 700 for _, size in requests(trace, change, 2)) for change in (1, 2)]
    assert taken == [len(doubts), doubts.count(2)]


def test_an_old_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(version=OLDEST - 1, newest=900)
    monkeypatch.setattr("memsize.kernels.cudnn.plans.Backend", lambda path: old)
    with pytest.raises(CudnnError, match=r"cuDNN 9\.10\.99 is older than 9\.11"):
        Library("libcudnn.so.9")
    assert (dotted_cudnn(91_501), dotted_cudnn(8907)) == ("9.15.1", "8.9.7")


def test_what_a_handle_begins_with() -> None:
    """The compute capability stands at byte 96, the multiprocessors at 28, the memory at 72."""
    description = cudnn_handle.described((8, 6))
    at = {offset: struct.unpack_from("<i", description, offset)[0] for offset in (0, 12, 28, 32, 96, 100)}
    assert at == {0: 2**31 - 1, 12: 1024, 28: 84, 32: 32, 96: 860, 100: 13_000} and len(description) == 104
    assert struct.unpack_from("<q", description, 72) == (80 << 30,)


def test_what_a_conversion_takes() -> None:
    """All three tensors with channels in steps of 16 bytes, and 16 bytes: 22 images of 134 channels count as 136."""
    odd = PLAIN._replace(dtype="float32", x=(22, 134, 17, 17), w=(211, 134, 1, 1), y=(22, 211, 9, 9))
    assert cudnn_handle.converted(odd) == 4 * (22 * 136 * 17 * 17 + 212 * 136 + 22 * 212 * 9 * 9) + 16 == 5_085_232
    assert cudnn_handle.converted(PLAIN) == OPERANDS + 16
    assert cudnn_handle.converted(PLAIN._replace(channels_last=True)) == 0


@pytest.mark.parametrize("version", [8907, 91_100])
def test_a_handle_is_written_for_some_releases_only(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsize.kernels.cudnn.handle.Backend", lambda path: SimpleNamespace(version=version))
    with pytest.raises(CudnnError, match="a handle that it did not make"):
        cudnn_handle.HandleLibrary("libcudnn.so.9")


def test_an_old_release_gets_a_process_of_its_own(releases: Path) -> None:
    (releases / "9.19.0" / "include" / "cudnn_version.h").write_text(
        "#define CUDNN_MAJOR 9\n#define CUDNN_MINOR 1\n#define CUDNN_PATCHLEVEL 0\n"
    )
    kind, path = installed_cudnn("9.1")
    assert kind == "SeparateLibrary" and Path(path).relative_to(releases).parts[0] == "9.19.0"
    assert installed_cudnn()[0] == "Library"


# -- cuDNN itself ------------------------------------------------------------------------------------------------------


def test_cudnn_answers_without_a_gpu(cudnn: Library) -> None:
    assert cudnn.version >= OLDEST and str(cudnn).startswith("9.")
    for gpu in (T4, A100, (8, 6), (8, 9), H100, (10, 0), (12, 0)):
        for operation in ("forward", "data", "filter"):
            convolution = PLAIN._replace(operation=operation)
            first = cudnn.plan(convolution, gpu)
            assert first is not None and first.workspace >= 0
            plans = cudnn.plans(convolution, gpu)
            assert plans[0] == first and len(plans) > 1


def test_cudnn_rearranges_row_major_tensors(cudnn: Library) -> None:
    """The reason for the estimate: room for the tensors in channels last; none where they are so."""
    for operation in ("forward", "data", "filter"):
        there = cudnn.plan(PLAIN._replace(operation=operation), H100)
        assert there is not None and 0.9 * OPERANDS < there.workspace < 1.3 * OPERANDS
        last = cudnn.plan(PLAIN._replace(operation=operation, channels_last=True), H100)
        assert last is not None and last.workspace < 0.1 * OPERANDS


def test_the_plan_is_the_first_of_all(cudnn: Library) -> None:
    """Also where settings rule out the first of cuDNN's list."""
    for change in ({}, {"tf32": False}, {"deterministic": True}, {"tf32": False, "deterministic": True}):
        for operation in ("forward", "data", "filter"):
            convolution = PLAIN._replace(dtype="float32", operation=operation, **change)
            for gpu in (T4, A100, H100):
                assert cudnn.plan(convolution, gpu) == cudnn.plans(convolution, gpu)[0]


def test_cudnn_keeps_to_pytorchs_settings(cudnn: Library) -> None:
    tensor_core, nondeterministic = 0, 4
    wide = PLAIN._replace(dtype="float32")
    assert any(tensor_core in plan.notes for plan in cudnn.plans(wide, A100))
    assert not any(tensor_core in plan.notes for plan in cudnn.plans(wide._replace(tf32=False), A100))
    weight = PLAIN._replace(operation="filter")
    assert any(nondeterministic in plan.notes for plan in cudnn.plans(weight, A100))
    assert not any(nondeterministic in plan.notes for plan in cudnn.plans(weight._replace(deterministic=True), A100))


@pytest.mark.parametrize(
    "convolution",
    [
        PLAIN._replace(dtype="float64"),
        PLAIN._replace(x=(8, 64, 1, 56), w=(128, 64, 1, 3), y=(8, 128, 1, 56), padding=(0, 1)),
        PLAIN._replace(w=(128, 2, 3, 3)),
        Convolution("data", "float32", (2, 8, 6, 6, 6), (4, 8, 3, 3, 3), (2, 4, 4, 4, 4), (0,) * 3, (1,) * 3, (1,) * 3),
    ],
    ids=["float64", "line", "grouped", "volume"],
)
def test_cudnn_knows_every_kind(cudnn: Library, convolution: Convolution) -> None:
    assert cudnn.plans(convolution, A100)


def test_cudnn_refuses_what_it_does_not_know(cudnn: Library) -> None:
    with pytest.raises(CudnnError, match=r"does not know compute capability 99\.0"):
        cudnn.plan(PLAIN, (99, 0))
    with pytest.raises(CudnnError):
        cudnn.plan(PLAIN._replace(w=(128, 7, 3, 3)), A100)
    assert cudnn.plan(PLAIN._replace(dtype="bfloat16"), T4) is None


def test_a_trace_by_cudnn(cudnn: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memsize.kernels.cudnn.installed.installed", lambda wanted: cudnn)
    trace = conv_trace(gpu="h100")
    plan = cudnn.plan(PLAIN._replace(tf32=torch.backends.cudnn.allow_tf32), H100)
    assert plan is not None and trace.cudnn == str(cudnn)
    assert [event.delta for event in trace.events][-2:] == [plan.workspace, -plan.workspace]


def test_asking_takes_no_memory(cudnn: Library) -> None:
    """Descriptors are given back: 3,000 questions would hold a gigabyte of them."""
    before = _resident()
    for batch in range(1, 1001):
        for operation in ("forward", "data", "filter"):
            cudnn.plan(PLAIN._replace(operation=operation, x=(batch, *PLAIN.x[1:]), y=(batch, *PLAIN.y[1:])), A100)
    assert _resident() - before < 200 * MIB


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_a_run_names_cudnn_for_its_own_convolutions_only() -> None:
    """On a T4, bfloat16 convolutions do not run on cuDNN, whatever another scenario asked it."""
    inputs = inputs_from_data(torch.zeros(1, 64, 32, 32))
    runner = Runner("m", nn.Conv2d(64, 64, 3), inputs, True, gpu=card("t4"), plans=Plans((7, 5)))
    fp16, bf16 = (runner.run(Forward(), SCENARIOS[name]) for name in ("fp16", "bf16"))
    assert any("convolution workspaces" in note for note in fp16.notes)
    assert bf16.notes == () and bf16.cudnn is None
