"""Memory that a convolution takes beside its tensors: the workspace of cuDNN, or the patches of PyTorch's own kernel.

Source: aten/src/ATen/native/Convolution.cpp (`use_cudnn`, `use_cudnn_depthwise`), cuda/ConvolutionMM2d.cu,
cuda/NaiveDilatedConvolution.cu and cuda/NaiveConvolutionTranspose3d.cu. Limit: a batch that cuDNN splits, since it
needs 64-bit indices, is treated as one that it does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from memsize.kernels.convolution import convolved_shape, per_dimension, suggests_last
from memsize.kernels.cudnn.plans import WIDTHS, Convolution, Operation, Plans
from memsize.kernels.registry import Temporary
from memsize.model.tensor_storage import dtype_name
from memsize.spec.stack import NEWEST, Release, release

_ASKED = "convolution workspaces are those that cuDNN {} reports"
_DOUBTED = (
    f"{_ASKED}, which was asked without a GPU: with 1×1 kernels and strides it may take none, or twice as much; device "
    "covers both"
)
_OTHER = (
    "convolution workspaces are estimates: cuDNN {} was asked, the stack has {}. Others choose other plans; "
    "MEMSIZE_CUDNN names the folder of a release"
)
_ESTIMATED = "convolution workspaces are estimates: install nvidia-cudnn-cu13 to ask cuDNN itself"
_WRONG = (
    "PyTorch {}.{} runs volumes in half precision itself, since cuDNN {} computes some of them wrongly: it unfolds "
    "each sample, which takes more memory. channels_last_3d or cuDNN 9.15 avoids it"
)
_LARGE = (
    "PyTorch runs convolutions of more than 2³¹ numbers in a sample itself, since cuDNN {} cannot index them: it "
    "unfolds each sample, which takes more memory. cuDNN 9.3 avoids it"
)


class Workspace(NamedTuple):
    """The bytes of a convolution's workspace, and the `doubt` about its plan."""

    bytes: int
    doubt: int = 0


NONE: Final = Workspace(0)
_MOST_INDICES: Final = 2**31 - 1


class Operands(NamedTuple):
    """The tensors and settings of one forward: of `aten::convolution`, in its order, without the bias."""

    x: torch.Tensor
    w: torch.Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


@dataclass(frozen=True, slots=True)
class ConvolutionWorkspaces:
    """The bytes that cuDNN, or PyTorch's own kernel, takes from the allocator during each convolution of a run.

    PyTorch's settings of cuDNN are read at each convolution, since a program sets them when it wants, but for its
    benchmark where `benchmark` says what it is: with it the first call of each convolution allocates the largest
    workspace of all plans, and later calls are taken to run the heuristics' first plan (Conv_v8.cpp,
    `generate_and_filter_plans`). `met` collects the convolutions that ran on cuDNN, with their workspaces.
    """

    plans: Plans
    benchmark: bool | None = None
    pytorch: Release = NEWEST
    met: dict[Convolution, int] = field(default_factory=dict)
    benchmarked: set[Convolution] = field(default_factory=set)
    """The convolutions whose plans the benchmark has tried."""
    distrusted: set[str] = field(default_factory=set)
    """Notes on the convolutions that PyTorch keeps from its cuDNN."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the source of the workspaces, where any was taken, and on what cuDNN is not given."""
        return (*sorted(self.distrusted), *self._on_source())

    def _on_source(self) -> tuple[str, ...]:
        if not any(self.met.values()):
            return ()
        if self.source is not None:
            is_doubted = any(size and self.plans.doubt(convolution) for convolution, size in self.met.items())
            return ((_DOUBTED if is_doubted else _ASKED).format(self.source),)
        other = self.plans.release
        return (_OTHER.format(other, self.plans.wanted) if other and self.plans.wanted else _ESTIMATED,)

    @property
    def source(self) -> str | None:
        """The cuDNN release that gave the workspaces; None where any of them is an estimate, or there are none."""
        return self.plans.source(self.met)

    def columns(self, backward: bool, args: Sequence[Any], result: Any) -> Temporary | None:
        """Return what PyTorch's own kernel takes for a convolution, or for its backward; None where cuDNN runs it."""
        x, w, *rest = args[backward:]
        call = Operands(x, w, *rest[1:7])
        return None if self._runs_on_cudnn(call) else _columns(call, args[0].shape if backward else result.shape)

    def forward(self, args: Sequence[Any], output: torch.Tensor) -> Workspace:
        """Return the workspace that cuDNN takes for `aten::convolution`."""
        x, w, _, *settings = args
        call = Operands(x, w, *settings)
        return self._workspace("data" if call.transposed else "forward", call, output.shape)

    def backward(self, args: Sequence[Any]) -> tuple[Workspace, Workspace]:
        """Return those for `aten::convolution_backward`: for the gradient of the input, then for the weight's."""
        grad, x, w, _, *settings, mask = args
        call = Operands(x, w, *settings)
        data = self._workspace("forward" if call.transposed else "data", call, grad.shape) if mask[0] else NONE
        return data, self._workspace("filter", call, grad.shape) if mask[1] else NONE

    def _workspace(self, operation: Operation, call: Operands, other: Sequence[int]) -> Workspace:
        """`other` is the shape of the forward's output. A transposed convolution is one from that to its input."""
        x, y = _as_image(call.x.shape), _as_image(other)
        rank = call.x.dim() - 2
        convolution = Convolution(
            operation=operation,
            dtype=dtype_name(call.x.dtype),
            x=y if call.transposed else x,
            w=_as_image(call.w.shape),
            y=x if call.transposed else y,
            padding=_along(call.padding, rank, 0),
            stride=_along(call.stride, rank, 1),
            dilation=_along(call.dilation, rank, 1),
            channels_last=suggests_last(call.x, call.w),
            deterministic=_is_deterministic(),
            tf32=torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32",
        )
        size = self.plans.workspace(convolution)
        benchmark = torch.backends.cudnn.benchmark if self.benchmark is None else self.benchmark
        if benchmark and convolution not in self.benchmarked:
            self.benchmarked.add(convolution)
            size = max(size, self.plans.benchmarked(convolution))
        self.met[convolution] = max(size, self.met.get(convolution, 0))
        return Workspace(size, self.plans.doubt(convolution))

    def _runs_on_cudnn(self, call: Operands) -> bool:
        """Whether PyTorch gives a forward, and so its backward, to cuDNN."""
        x, w = call.x, call.w
        if not torch.backends.cudnn.enabled or x.dtype is not w.dtype or dtype_name(x.dtype) not in WIDTHS:
            return False
        if not x.numel() or not w.numel():
            return False
        if x.dtype is torch.bfloat16 and self.plans.capability < (8, 0):
            return False
        if any(more >= step for more, step in zip(call.output_padding, call.stride, strict=False)):
            return False
        last = suggests_last(x, w)
        if _is_deterministic() and max(call.dilation) > 1 and not last:
            return False
        if _is_depthwise(call) and not last and not _suits_cudnn(call):
            return False
        return not self._distrusts(call, last)

    def _distrusts(self, call: Operands, last: bool) -> bool:
        """Whether PyTorch keeps from its cuDNN what that computes wrongly: volumes in half precision (`use_cudnn`
        since 2.9, pytorch/pytorch#163539), and a sample of more than 2³¹ numbers, which needs 64-bit indices.
        """
        wanted = self.plans.wanted or ""
        cudnn = release(wanted)
        if cudnn is None:
            return False
        is_half = call.x.dtype in (torch.float16, torch.bfloat16)
        is_volume = call.w.dim() == 5 and max(call.w.shape[2:]) > 1
        if is_half and is_volume and not last and self.pytorch >= (2, 9) and (9, 8) <= cudnn < (9, 15):
            self.distrusted.add(_WRONG.format(*self.pytorch, wanted))
            return True
        if cudnn < (9, 3) and _numbers_of_a_sample(call) > _MOST_INDICES:
            self.distrusted.add(_LARGE.format(wanted))
            return True
        return False


def _is_deterministic() -> bool:
    """Whether convolutions take deterministic algorithms only (`at::convolution`)."""
    return torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


def _numbers_of_a_sample(call: Operands) -> int:
    """The larger of a sample's input and output."""
    settings = call.stride, call.padding, call.dilation, call.transposed, call.output_padding, call.groups
    output = convolved_shape(call.x.shape, call.w.shape, *settings)
    return max(math.prod(call.x.shape[1:]), math.prod((output or ())[1:]))


def _is_depthwise(call: Operands) -> bool:
    channels = call.x.shape[1]
    return not call.transposed and 1 < call.groups == channels and call.w.shape[0] % channels == 0


def _columns(call: Operands, other: Sequence[int]) -> Temporary:
    """Return what PyTorch's own kernel takes beside its results: one sample's patches, also where it could read the
    sample itself, as for 1×1 pixels. The groups run one after another on parts that are copied, and their results are
    joined. Depthwise kernels take nothing. `other` is the shape of the forward's output.
    """
    x, w, groups = call.x, call.w, call.groups
    if _is_depthwise(call) or not x.numel():
        return Temporary((0,), x.dtype)
    places = x.shape[2:] if call.transposed else other[2:]
    count = w.shape[1] * w.shape[2:].numel() * math.prod(places)
    if groups > 1:
        parts = (x.numel() + w.numel()) // groups
        count = max(count + parts, math.prod(other))
    return Temporary((count,), x.dtype)


def _as_image(shape: Sequence[int]) -> tuple[int, ...]:
    """A one-dimensional signal is an image of height 1 (`view1d_as_2d`)."""
    return (*shape[:2], 1, shape[2]) if len(shape) == 3 else tuple(shape)


def _along(values: Sequence[int], rank: int, flat: int) -> tuple[int, ...]:
    """A setting for each dimension; `flat` is the value for the height of a one-dimensional signal."""
    return (flat, *values) if rank == 1 else per_dimension(values, rank)


def _suits_cudnn(call: Operands) -> bool:
    """Whether a row-major depthwise convolution is one of those in float16 for which cuDNN was found faster
    (`check_cudnn_depthwise_workload_with_filter`).
    """
    (batch, channels, *inner), line = call.x.shape, call.x.dim() == 3
    rows, width, strides = 1 if line else inner[0], inner[-1], per_dimension(call.stride, len(inner))
    square = line or rows == 1 or strides[0] == strides[-1]
    if call.x.dtype is not torch.float16 or len(inner) > 2 or max(call.dilation) > 1 or not square or channels < 32:
        return False
    stride, height, kernel = strides[-1], 1 if line else call.w.shape[2], call.w.shape[-1]
    if rows == 1 and stride == 1:
        return True
    if height != kernel or kernel not in (1, 3, 5) or width < 7 or stride > 2:
        return False
    if stride == 1:
        return True
    if batch == 1:
        return kernel != 1 or width <= 28
    if kernel == 1:
        return batch <= 16 and channels >= 128 and width <= 7
    return channels >= 512 or (channels >= 256 and width >= 28)
