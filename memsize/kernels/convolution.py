"""Windows over signals, images and volumes: convolutions, with the copies that they make first and the workspaces that
cuDNN or PyTorch's own kernel takes; pooling and interpolation.

The output and the gradients are channels last where the input is, or the weight of a convolution.

Source: aten/src/ATen/native/Convolution.cpp (`_select_conv_backend`, `use_cudnn`, `use_cudnn_depthwise`,
`convolution_backward`), cudnn/ConvShared.cpp, cuda/ConvolutionMM2d.cu, cuda/NaiveDilatedConvolution.cu and
cuda/NaiveConvolutionTranspose3d.cu. Limit: a batch that cuDNN splits, since it needs 64-bit indices, is treated as
one that it does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from memsize.kernels.cudnn.plans import WIDTHS, Convolution, Operation, Plans
from memsize.kernels.registry import (
    Copies,
    Temporary,
    copies_of,
    copy_unless_contiguous,
    overloads,
    result_first,
    same_dtype,
    shape_rule,
    temporaries_of,
)
from memsize.kernels.strides import Shape
from memsize.kernels.tensors import (
    are_alike,
    are_floating,
    are_plain,
    empty,
    formatted,
    is_channels_last,
    is_dense_channels_last,
)
from memsize.model.tensor_storage import dtype_name
from memsize.spec.stack import NEWEST, Release, release

if TYPE_CHECKING:
    from memsize.records.layout import Format

_aten = torch.ops.aten
FORWARD = _aten.convolution.default
BACKWARD = _aten.convolution_backward.default
TRACED = _aten._convolution.default
"""As `torch.jit.trace` records it: the same, with settings of cuDNN."""
TRACED_AS = 9
"""How many of its arguments are those of `FORWARD`."""

same_dtype(slice(0, 3), FORWARD)  # Convolution.cpp, at the head of `convolution`


# -- results ----------------------------------------------------------------------------------------------------------


def per_dimension(values: Sequence[int], rank: int) -> tuple[int, ...]:
    """Repeat a single value for each of `rank` dimensions; return several values as they are."""
    return tuple(values) * rank if len(values) == 1 else tuple(values)


def forward_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Return the positions of a kernel along one dimension. The kernel spans ``dilation·(kernel-1) + 1`` of the padded
    size; each ``stride`` of the rest holds one more position."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def transposed_size(size: int, kernel: int, stride: int, padding: int, dilation: int, output_padding: int) -> int:
    """The size that `forward_size` maps to `size`; striding forgets a remainder, which `output_padding` gives back."""
    return (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1


def convolved_shape(
    shape: Shape,
    weight: Shape,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> tuple[int, ...] | None:
    """The output's shape, None for arguments that don't fit together.

    A weight is (output channels, input channels / groups, *kernel), a transposed one (input channels, output channels /
    groups, *kernel).
    """
    rank = len(shape) - 2
    options = [per_dimension(values, rank) for values in (stride, padding, dilation, output_padding)]
    if rank not in (1, 2, 3) or len(weight) != rank + 2 or any(len(o) != rank for o in options) or groups < 1:
        return None
    steps, pads, dilations, extra = options
    if min(*steps, *dilations) < 1 or min(*pads, *extra) < 0 or 0 in weight or 0 in shape[1:]:
        return None
    if shape[1] != (weight[0] if transposed else weight[1] * groups) or weight[0] % groups:
        return None
    dimensions = zip(shape[2:], weight[2:], steps, pads, dilations, strict=True)
    if transposed:
        if any(more >= max(step, gap) for more, step, gap in zip(extra, steps, dilations, strict=True)):
            return None
        sizes = [transposed_size(*dimension, more) for dimension, more in zip(dimensions, extra, strict=True)]
    else:
        sizes = [forward_size(*dimension) for dimension in dimensions]
    return (shape[0], weight[1] * groups if transposed else weight[0], *sizes) if min(sizes) > 0 else None


def suggests_last(tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether cuDNN works on channels last in a convolution (ConvUtils.h, `cudnn_conv_suggest_memory_format`). In one
    dimension the input is made row-major first."""
    return tensor.dtype is not torch.float64 and (is_channels_last(tensor) or is_channels_last(weight))


@shape_rule("aten::convolution")
def _convolution(
    tensor: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    """PyTorch's `meta` kernel is always row-major; CUDA keeps channels last."""
    if not are_plain(tensor, weight, bias) or not are_alike(tensor, weight) or not tensor.is_floating_point():
        return NotImplemented
    shape = convolved_shape(tensor.shape, weight.shape, stride, padding, dilation, transposed, output_padding, groups)
    if shape is None or (bias is not None and (bias.shape != (shape[1],) or bias.dtype is not tensor.dtype)):
        return NotImplemented
    return formatted(shape, tensor.dtype, suggests_last(tensor, weight))


@shape_rule("aten::convolution_backward")
def _convolution_backward(
    grad: Any, tensor: Any, weight: Any, bias_sizes: Any, _stride: Any, _padding: Any, _dilation: Any,
    _transposed: bool, _output_padding: Any, _groups: int, mask: Any,
) -> Any:  # fmt: skip
    """Gradients in the format of the forward; one that is not asked for is None."""
    if not are_plain(grad, tensor, weight) or not are_alike(grad, tensor, weight):
        return NotImplemented
    last = suggests_last(tensor, weight)
    bias_shape = bias_sizes if bias_sizes is not None else grad.shape[1:2]
    return (
        formatted(tensor.shape, grad.dtype, last) if mask[0] else None,
        formatted(weight.shape, grad.dtype, last) if mask[1] else None,
        empty(bias_shape, grad.dtype) if mask[2] else None,
    )


# -- copies -----------------------------------------------------------------------------------------------------------


@copies_of(FORWARD)
def _forward_copies(args: Any, _: Any) -> Copies:
    """cuDNN takes one format: channels last where the input or the weight suggests it, except in float64. What lies
    otherwise is made so (Convolution.cpp, ``contiguous``).
    """
    tensor, weight = args[0], args[1]
    return _misfits((tensor, weight), suggests_last(tensor, weight))


@copies_of(BACKWARD)
def _backward_copies(args: Any, _: Any) -> Copies:
    """Copies as in the forward, of what each requested gradient reads: the input's the weight, the weight's the input
    (Convolution.cpp, `convolution_backward`; ConvShared.cpp, `cudnn_convolution_backward`).
    """
    gradient, tensor, weight, mask = args[0], args[1], args[2], args[-1]
    read = (gradient, *([tensor] if mask[1] else []), *([weight] if mask[0] else []))
    return _misfits(read, suggests_last(tensor, weight)) if any(mask[:2]) else iter(())


def _misfits(operands: tuple[torch.Tensor, ...], last: bool) -> Copies:
    wanted: Format = "channels last" if last else "row-major"
    lies_so = is_dense_channels_last if last else torch.Tensor.is_contiguous
    return ((operand, wanted) for operand in operands if not lies_so(operand))


# -- workspaces -------------------------------------------------------------------------------------------------------

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
    "PyTorch {}.{} does not give cuDNN {} volumes in half precision, some of which that computes wrongly, and unfolds "
    "each sample: channels_last_3d or cuDNN 9.15 avoids it"
)
_LARGE = "PyTorch does not give cuDNN {} samples of more than 2³¹ numbers, and unfolds each: cuDNN 9.3 avoids it"


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

    PyTorch's settings of cuDNN are those of when the run begins, apart from its benchmark, which a program may switch
    on at any time unless `benchmark` says what it is: with it the first call of each convolution allocates the largest
    workspace of all plans, and later calls are taken to run the heuristics' first plan (Conv_v8.cpp,
    `generate_and_filter_plans`). `met` collects the convolutions that ran on cuDNN, with their workspaces.
    """

    plans: Plans
    enabled: bool
    deterministic: bool
    tf32: bool
    benchmark: bool | None = None
    pytorch: Release = NEWEST
    met: dict[Convolution, int] = field(default_factory=dict)
    benchmarked: set[Convolution] = field(default_factory=set)
    """The convolutions whose plans the benchmark has tried."""
    distrusted: set[str] = field(default_factory=set)
    """Notes on the convolutions that PyTorch keeps from its cuDNN."""

    @classmethod
    def on(cls, plans: Plans, benchmark: bool | None = None, release: Release | None = None) -> ConvolutionWorkspaces:
        """The convolutions on the GPU of `plans`, under PyTorch's present settings and the rules of its `release`."""
        settings = torch.backends.cudnn
        return cls(plans, settings.enabled, settings.deterministic, settings.allow_tf32, benchmark, release or NEWEST)

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
            deterministic=self.deterministic,
            tf32=self.tf32,
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
        if not self.enabled or x.dtype is not w.dtype or dtype_name(x.dtype) not in WIDTHS:
            return False
        if not x.numel() or not w.numel():
            return False
        if x.dtype is torch.bfloat16 and self.plans.capability < (8, 0):
            return False
        if any(more >= step for more, step in zip(call.output_padding, call.stride, strict=False)):
            return False
        last = suggests_last(x, w)
        if self.deterministic and max(call.dilation) > 1 and not last:
            return False
        if self._distrusts(call, last):
            return False
        return not _is_depthwise(call) or last or _suits_cudnn(call)

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


# -- pooling ----------------------------------------------------------------------------------------------------------


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Windows along one dimension. With `ceil_mode` a last, partial window counts if it starts inside the input or the
    padding before it (ATen/native/Pool.h)."""
    left = size + 2 * padding - dilation * (kernel - 1) - 1 + (stride - 1 if ceil_mode else 0)
    windows = left // stride + 1
    return windows - 1 if ceil_mode and (windows - 1) * stride >= size + padding else windows


def _pooled_shape(tensor: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Any:
    """The shape of a pooled image; None for arguments that don't fit. Without a stride: the kernel's size."""
    options = [per_dimension(values, 2) for values in (kernel, stride or kernel, padding, dilation)]
    if not are_floating(tensor) or tensor.dim() not in (3, 4):
        return None
    if any(len(values) != 2 for values in options):
        return None
    sizes, steps, pads, gaps = options
    if min(*sizes, *steps, *gaps) < 1 or min(pads) < 0 or 0 in tensor.shape[1:]:
        return None
    if any(2 * pad > size for pad, size in zip(pads, sizes, strict=True)):
        return None
    pooled = [pooled_size(*d, ceil_mode) for d in zip(tensor.shape[-2:], sizes, steps, pads, gaps, strict=True)]
    return (*tensor.shape[:-2], *pooled) if min(pooled) > 0 else None


@shape_rule("aten::max_pool2d_with_indices")
def _max_pool2d(
    tensor: Any, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> Any:
    shape = _pooled_shape(tensor, kernel, stride, padding, dilation, ceil_mode)
    if shape is None:
        return NotImplemented
    last = is_channels_last(tensor)
    return formatted(shape, tensor.dtype, last), formatted(shape, torch.int64, last)


@shape_rule("aten::avg_pool2d")
def _avg_pool2d(
    tensor: Any, kernel: Any, stride: Any = (), padding: Any = (0,), ceil_mode: bool = False, _count: bool = True,
    divisor: int | None = None,
) -> Any:  # fmt: skip
    shape = _pooled_shape(tensor, kernel, stride, padding, (1,), ceil_mode)
    return NotImplemented if shape is None or divisor == 0 else formatted(shape, tensor.dtype, is_channels_last(tensor))


@shape_rule("aten::max_pool2d_with_indices_backward", "aten::avg_pool2d_backward")
def _pool2d_backward(grad: Any, tensor: Any, *_: Any) -> Any:
    """The result is like the input."""
    if not are_plain(grad, tensor) or not are_alike(grad, tensor) or grad.shape[:-3] != tensor.shape[:-3]:
        return NotImplemented
    return formatted(tensor.shape, tensor.dtype, is_channels_last(tensor))


# -- folding ----------------------------------------------------------------------------------------------------------

copies_of(_aten.im2col.default, _aten.col2im.default)(copy_unless_contiguous)
result_first(_aten.im2col.default, _aten.col2im.default)


@temporaries_of(_aten.im2col.default)
def _made_like_the_image(tensor: torch.Tensor, *_: Any) -> Iterator[Temporary]:
    """The columns are made like the image and resized, which allocates them anew (cuda/Im2Col.cu)."""
    yield Temporary(tuple(tensor.shape), tensor.dtype)


@shape_rule("aten::col2im")
def _col2im(tensor: Any, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    """The image is made like the columns and resized, which frees nothing (cuda/Col2Im.cu)."""
    options = (size, kernel, stride, padding, dilation)
    if not are_plain(tensor) or tensor.dim() not in (2, 3) or any(len(values) != 2 for values in options):
        return NotImplemented
    if min(*size, *kernel, *stride, *dilation) < 1 or min(padding) < 0 or 0 in tensor.shape:
        return NotImplemented
    windows = [forward_size(*sizes) for sizes in zip(*options, strict=True)]
    channels, rest = divmod(tensor.shape[-2], math.prod(kernel))
    if rest or min(windows) < 1 or tensor.shape[-1] != math.prod(windows):
        return NotImplemented
    return empty(tensor.shape, tensor.dtype).resize_((*tensor.shape[:-2], channels, *size))


# -- interpolation and padding ----------------------------------------------------------------------------------------

copies_of(_aten.reflection_pad2d.default)(copy_unless_contiguous)  # cuda/ReflectionPad.cu
_INTERPOLATIONS = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)


@shape_rule(*overloads(_INTERPOLATIONS))
def _interpolation(tensor: Any, size: Any, *_: Any, **__: Any) -> Any:
    """The result has the input's memory format (UpSample*.cpp, `suggest_memory_format`)."""
    if not are_floating(tensor) or tensor.dim() != len(size) + 2:
        return NotImplemented
    if 0 in tensor.shape or min(size) < 1:
        return NotImplemented
    return formatted((*tensor.shape[:2], *size), tensor.dtype, is_channels_last(tensor))


@shape_rule(*overloads(_INTERPOLATIONS, "_backward"))
def _interpolation_backward(grad: Any, size: Any, shape: Any, *_: Any, **__: Any) -> Any:
    """The result has the gradient's memory format."""
    if not are_plain(grad) or tuple(grad.shape) != (*shape[:2], *size):
        return NotImplemented
    return formatted(shape, grad.dtype, is_channels_last(grad))
