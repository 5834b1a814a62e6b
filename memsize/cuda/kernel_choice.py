"""Ops whose CUDA kernel is not the one that PyTorch runs elsewhere: which kernel CUDA would run for each call.

- LSTM, GRU and RNN: one cuDNN call for all steps, and fused LSTM and GRU cells. cuDNN reads the weights from one flat
  buffer. A recurrent module's own parameters lie in one on a GPU, and cost nothing more; weights that are computed, and
  all of bfloat16, which `flatten_parameters` passes over, are copied into one at every call. Under autocast the weights
  are copied into a float16 buffer at every call, also where the region's dtype is bfloat16. `memsize.kernels.rnn` says
  what the kernels return and keep. Limit: where cuDNN does not take the call, the layers' steps are those of other
  devices.
- `batch_norm`: cuDNN's kernel keeps its statistics in training only, PyTorch's own kernel in evaluation too.
- `rms_norm`: one kernel that keeps one number per row, where other devices, and CUDA until PyTorch 2.8, run, and keep,
  each step of the formula.
- `softmax` of float16 scores in float32: one kernel that widens as it reads, without a float32 copy. bfloat16 scores
  are copied first on CUDA too.
- `dropout`: one fused kernel that keeps a boolean mask, where the CPU multiplies by floating noise. In-place, feature
  and alpha dropout have no fused kernel on CUDA either.
- `one_hot` writes ones into zeros; on `meta` PyTorch compares instead, which makes a boolean tensor and a copy. Where
  the number of classes has to come from the data, the op is left to PyTorch; a CPU would also check the smallest and
  the largest class.
- `mish_backward`: the one activation with a kernel for CPU and CUDA alone, where PyTorch computes the formula step by
  step on `meta` (native_functions.yaml).

Source: aten/src/ATen/native/Normalization.cpp (`_select_batch_norm_backend`, `_batch_norm_impl_index`), layer_norm.cpp
(`rms_norm_symint`), SoftMax.cpp, cuda/SoftMax.cu (`host_softmax`), Dropout.cpp (`is_fused_kernel_acceptable`),
Onehot.cpp, RNN.cpp (`use_cudnn`, the fused cells), aten/src/ATen/cudnn/AutocastRNN.cpp, torch/nn/modules/rnn.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from memsize.cuda import autocast
from memsize.kernels.rnn import MODES
from memsize.kernels.semantics import Semantics, current, simulated_release
from memsize.kernels.tensors import channels_last_format, is_dense_channels_last
from memsize.known_values.values import constant_of
from memsize.torch_internals.meta import Kernel, is_meta, key_excluded, overload

_TRAINING_BATCH, _EVALUATION_BATCH = 880_801, 65_535
_INDEXED = 2**31 - 1
_BFLOAT16_CUDNN, _BFLOAT16_CAPABILITY = 91300, (8, 0)
_FUSED_RMS_NORM = (2, 9)
"""The first release whose native_functions.yaml has CUDA kernels for `_fused_rms_norm` and its gradient."""


def kernels() -> Mapping[str, Kernel]:
    """Return the functions that choose a kernel, by the operator's name."""
    return {
        "batch_norm": _batch_norm,
        "rms_norm": _rms_norm,
        "softmax.int": _softmax("softmax"),
        "log_softmax.int": _softmax("log_softmax"),
        "dropout": _dropout,
        "one_hot": _one_hot,
        "mish_backward": _mish_backward,
        **{f"{name}.{form}": _layers(name, form) for name in MODES for form in ("input", "data")},
        "lstm_cell": _cell("lstm"),
        "gru_cell": _cell("gru"),
    }


def _stands_in(tensor: Tensor) -> bool:
    """Whether CUDA's kernel can be called for its result on `tensor`; on the CPU it could not run."""
    semantics = current()
    return semantics is not None and semantics.is_stand_in(tensor)


# -- batch norm -------------------------------------------------------------------------------------------------------


def takes_cudnn(
    tensor: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None,
    training: bool, eps: float,
) -> bool:  # fmt: skip
    """Whether CUDA gives this batch norm to cuDNN: not for bfloat16, not for half parameters of a half input, not for
    two dimensions, not without weight and bias."""
    if weight is None or bias is None or torch.bfloat16 in (tensor.dtype, weight.dtype):
        return False
    if tensor.dtype is torch.float16 and weight.dtype is not torch.float32:
        return False
    if (mean is None) is not (variance is None) or (mean is None and not training):
        return False
    batch = _TRAINING_BATCH if training else _EVALUATION_BATCH
    fits = tensor.dim() >= 3 and tensor.shape[0] <= batch and tensor.numel() < _INDEXED
    return fits and eps >= 0 and torch._C._get_cudnn_enabled()


def _batch_norm(
    tensor: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None,
    training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    # The flag given is not read: the global one is.
    with key_excluded:
        parameters = (weight, bias, mean, variance)
        if _stands_in(tensor) and tensor.numel() and takes_cudnn(tensor, *parameters, training, eps):
            is_last = not tensor.is_contiguous() and is_dense_channels_last(tensor)
            format = channels_last_format(tensor) if is_last else torch.contiguous_format
            dense = (parameter if parameter is None else parameter.contiguous() for parameter in parameters)
            call = overload("cudnn_batch_norm")
            return call(tensor.contiguous(memory_format=format), *dense, training, momentum, eps)[0]  # type: ignore[no-any-return]
        plain = overload("batch_norm")
        return plain(tensor, *parameters, training, momentum, eps, cudnn_enabled)  # type: ignore[no-any-return]


# -- RMS norm ---------------------------------------------------------------------------------------------------------


def _rms_norm(tensor: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """One kernel, unless the weight has another dtype than the input: then the formula, step by step."""
    with key_excluded:
        # Errors about other sizes than the last ones are PyTorch's own.
        is_suffix = len(shape) > 0 and list(tensor.shape[-len(shape) :]) == list(shape)
        fits = weight is None or (weight.dtype is tensor.dtype and list(weight.shape) == list(shape))
        if not (_stands_in(tensor) and _fuses_rms_norm() and tensor.is_floating_point() and is_suffix and fits):
            return overload("rms_norm")(tensor, shape, weight, eps)  # type: ignore[no-any-return]
        return _FusedRMSNorm.apply(tensor, weight, list(shape), eps)  # type: ignore[no-any-return,no-untyped-call]


def _fuses_rms_norm() -> bool:
    release = simulated_release()
    return release is None or release >= _FUSED_RMS_NORM


class _FusedRMSNorm(torch.autograd.Function):
    """`_fused_rms_norm` with the gradient that it has on CUDA.

    On `meta` PyTorch would run the formula instead, because that is how the operator is written for other devices.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor | None, shape: list[int], eps: float | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result, rstd = overload("_fused_rms_norm")(tensor, shape, weight, eps)
        ctx.save_for_backward(tensor, weight, rstd)
        ctx.shape, ctx.eps = shape, eps
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensor, weight, rstd = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:2])
        if not torch.is_grad_enabled():
            gradients = overload("_fused_rms_norm_backward")(grads[0], tensor, ctx.shape, rstd, weight, mask)
            return *gradients, None, None
        # By the formula, so that the gradients have gradients themselves (`create_graph`).
        wanted = [t for t, needed in zip((tensor, weight), mask, strict=True) if needed and t is not None]
        result = overload("_fused_rms_norm")(tensor, ctx.shape, weight, ctx.eps)[0]
        gradients = iter(torch.autograd.grad(result, wanted, grads[0], create_graph=True))
        return *(next(gradients) if needed else None for needed in mask), None, None


# -- softmax ----------------------------------------------------------------------------------------------------------


def _softmax(name: str) -> Kernel:
    def kernel(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        with key_excluded:
            if tensor.dtype is torch.float16 and dtype is torch.float32 and _stands_in(tensor):
                return overload(f"_{name}")(tensor, dim, True)  # type: ignore[no-any-return]
            return overload(f"{name}.int")(tensor, dim, dtype)  # type: ignore[no-any-return]

    return kernel


# -- dropout ----------------------------------------------------------------------------------------------------------


def _dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    semantics = current()
    is_fused = train and 0 < p < 1 and semantics is not None and semantics.stands_for_cuda(tensor) and tensor.numel()
    with key_excluded:
        if is_fused:
            return overload("native_dropout")(tensor, p, train)[0]  # type: ignore[no-any-return]
        return overload("dropout")(tensor, p, train)  # type: ignore[no-any-return]


# -- one-hot vectors --------------------------------------------------------------------------------------------------


def _one_hot(index: Tensor, classes: int = -1) -> Tensor:
    semantics = current()
    with key_excluded:
        is_written = semantics is not None and semantics.stands_for_cuda(index) and index.dtype is torch.int64
        if not is_written or classes < 1:
            return overload("one_hot")(index, classes)  # type: ignore[no-any-return]
        if not index.numel():
            return index.new_empty((*index.shape, classes))
        zeros = torch.zeros((*index.shape, classes), dtype=index.dtype, device=index.device)
        return zeros.scatter_(-1, index.unsqueeze(-1), 1)


# -- the gradient of Mish ---------------------------------------------------------------------------------------------


def _mish_backward(grad: Tensor, tensor: Tensor) -> Tensor:
    with key_excluded:
        if _stands_in(tensor) and not torch.is_grad_enabled():  # else autograd wants the formula
            with torch._C._AutoDispatchBelowAutograd():
                return overload("mish_backward")(grad, tensor)  # type: ignore[no-any-return]
        return overload("mish_backward")(grad, tensor)  # type: ignore[no-any-return]


# -- recurrent layers -------------------------------------------------------------------------------------------------


def _layers(name: str, form: str) -> Kernel:
    def kernel(*args: Any) -> Any:
        tensor, semantics = args[0], current()
        stands_in = semantics is not None and semantics.is_stand_in(tensor)
        with key_excluded:
            if semantics is not None and stands_in and tensor.numel() and torch._C._get_cudnn_enabled():
                is_new = semantics.cudnn >= _BFLOAT16_CUDNN and semantics.capability >= _BFLOAT16_CAPABILITY
                taken = (torch.float16, torch.float32, torch.float64, *((torch.bfloat16,) if is_new else ()))
                outputs = _cudnn_rnn(name, form, semantics, *args) if tensor.dtype in taken else None
                if outputs is not None:
                    return outputs[: 3 if name == "lstm" else 2]
            if not (is_meta(tensor) or stands_in):
                return overload(f"{name}.{form}")(*args)
        # The operator is a composite: what it calls is seen again, and cast by autocast.
        return getattr(getattr(torch.ops.aten, name), form).decompose(*args)

    return kernel


def _cudnn_rnn(name: str, form: str, semantics: Semantics, tensor: Tensor, *args: Any) -> Any:
    """The outputs of `_cudnn_rnn`; None where only the data tells the sizes, or PyTorch should name the mistake."""
    sizes: list[int] = []
    if form == "input":
        hidden, weights, has_biases, layers, dropout, train, bidirectional, batch_first = args
    else:
        batch_sizes, hidden, weights, has_biases, layers, dropout, train, bidirectional = args
        values = constant_of(batch_sizes) if is_meta(batch_sizes) else batch_sizes
        if values is None:
            return None
        sizes, batch_first = values.tolist(), False
    first, cell = hidden if isinstance(hidden, (list, tuple)) else (hidden, None)
    # A projected output is narrower than the cell's state.
    projects = cell is not None and cell.shape[-1] != first.shape[-1]
    width, projected = (cell.shape[-1], first.shape[-1]) if projects else (first.shape[-1], 0)
    stride = (4 if has_biases else 2) + (projected > 0)
    is_flat = all(isinstance(w, torch.nn.Parameter) and w.dtype is not torch.bfloat16 for w in weights)
    buffer = weights[0].detach() if is_flat else None
    if autocast.active() is not None:
        weights, buffer = _recast(weights, buffer, stride, semantics)
        cell = None if cell is None else autocast.cast(cell, torch.float16, semantics)
        first = autocast.cast(first, torch.float16, semantics)
        tensor = autocast.cast(tensor, torch.float16, semantics)
    states = [state for state in (tensor, first, cell) if state is not None]
    if any(other.dtype is not tensor.dtype for other in (*states, *weights)):
        return None
    shape = (MODES[name], width, projected, layers, batch_first, dropout, train, bidirectional)
    return overload("_cudnn_rnn")(tensor, weights, stride, buffer, first, cell, *shape, sizes, None)


def _recast(
    weights: list[Tensor], buffer: Tensor | None, stride: int, semantics: Semantics
) -> tuple[list[Tensor], Tensor | None]:
    """The weights as parts of one new float16 buffer, through which their gradients come back; and that buffer."""
    dtype = weights[0].dtype
    if dtype in (torch.float16, torch.float64) or any(w.dtype is not dtype for w in weights):
        return weights, buffer
    # cuDNN's buffer has room for biases also where the layers have none.
    biases = sum(2 * weight.shape[0] for weight in weights[::stride]) if stride in (2, 3) else 0
    length = sum(weight.numel() for weight in weights) + biases
    flat = torch.zeros(length, dtype=torch.float16, device=weights[0].device)
    parts = list(_copied(weights, flat))
    if semantics.observer is not None:
        for weight, part in zip(weights, parts, strict=True):
            semantics.observer(weight, part)
    return parts, flat


def _copied(weights: Sequence[Tensor], flat: Tensor) -> Iterator[Tensor]:
    """Each weight's copy in `flat`, a tensor of its own and no view in autograd's eyes."""
    offset = 0
    for weight in weights:
        part = torch.empty(0, dtype=flat.dtype, device=flat.device)
        part.set_(flat.untyped_storage(), offset, (weight.numel(), 1), (1, 1))
        yield part.copy_(weight.view_as(part) if weight.is_contiguous() else weight.reshape(part.shape))
        offset += weight.numel()


# -- recurrent cells --------------------------------------------------------------------------------------------------


def _cell(name: str) -> Kernel:
    is_lstm = name == "lstm"

    def kernel(
        tensor: Tensor,
        hidden: Any,
        input_weight: Tensor,
        hidden_weight: Tensor,
        input_bias: Tensor | None = None,
        hidden_bias: Tensor | None = None,
    ) -> Any:
        first, state = hidden if is_lstm else (hidden, hidden)
        with key_excluded:
            if _stands_in(tensor):
                with suppress(NotImplementedError):  # the fused kernel of a GRU runs only in a trace
                    gates = tensor.matmul(input_weight.t()), first.matmul(hidden_weight.t())
                    outputs = overload(f"_thnn_fused_{name}_cell")(*gates, state, input_bias, hidden_bias)
                    return outputs[:2] if is_lstm else outputs[0]
            return overload(f"{name}_cell")(tensor, hidden, input_weight, hidden_weight, input_bias, hidden_bias)

    return kernel
