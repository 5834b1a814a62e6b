"""cuDNN's recurrent layers, and fused LSTM and GRU cells: what they return, and what they keep for backward.

cuDNN keeps one reserve space instead of every step's gates. Its size has no published formula: the one here was found
by asking the library (`cudnnGetRNNTempSpaceSizes` of cuDNN 9.19 and 9.24, on a machine without a GPU), and agrees with
it to the byte over some thousand shapes. It has not been measured on a GPU yet.

Source: aten/src/ATen/native/cudnn/RNN.cpp, aten/src/ATen/native/cuda/RNN.cu. Limits: cuDNN's workspace, its dropout
state (a few MiB, once per process) and the copies that it makes of inputs which are not row-major are not counted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from memsize.kernels.registry import shape_rule
from memsize.kernels.strides import contiguous
from memsize.kernels.tensors import are_plain, empty, like

_RELU, _TANH, _LSTM, _GRU = range(4)
MODES = {"rnn_relu": _RELU, "rnn_tanh": _TANH, "lstm": _LSTM, "gru": _GRU}
"""cuDNN's number of each kind of layer."""

_GATES = {_RELU: 1, _TANH: 1, _LSTM: 4, _GRU: 3}
_SECTION, _HEADER = 32, 256
"""Bytes: each part of the reserve space is rounded up to the one, and the other comes on top."""


class Net(NamedTuple):
    """A stack of recurrent layers, by the arguments of `_cudnn_rnn`. `projected` is 0 where nothing is projected."""

    mode: int
    inputs: int
    hidden: int
    projected: int
    layers: int
    bidirectional: bool

    @property
    def directions(self) -> int:
        """1, or 2 where the layers run both ways."""
        return 1 + self.bidirectional

    @property
    def width(self) -> int:
        """The size of one direction's output."""
        return self.projected or self.hidden


class Batch(NamedTuple):
    """The sequences of one call: how many, the longest one's steps, and the steps of all (fewer if packed)."""

    sequences: int
    longest: int
    steps: int


def weight_elements(net: Net) -> int:
    """Elements of the flat weights: matrices, projections, and two biases per gate, whether used or not."""
    gates = _GATES[net.mode] * net.hidden
    read = [net.inputs] + [net.width * net.directions] * (net.layers - 1)
    own = gates * (net.width + 2) + net.projected * net.hidden
    return net.directions * sum(gates * size + own for size in read)


def reserve_bytes(net: Net, batch: Batch, size: int, dropout: float) -> int:
    """Bytes of the reserve space for values of `size` bytes.

    Kept for each step, layer and direction: an LSTM's 4 gates and its cell state (projected: the unprojected and the
    projected output too), 6 vectors of a GRU, the output of a plain RNN; between layers the output in full width, and
    of each dropout mask one bit per element that the next layer's directions read.
    """
    cells = batch.steps * net.layers * net.directions * size
    state = cells * net.hidden
    parts = {_LSTM: [4 * state, state], _GRU: [6 * state]}.get(net.mode, [state])
    if net.projected:
        parts += [state, cells * net.projected]
    parts.append(batch.steps * (net.layers - 1) * net.directions * net.hidden * size)
    if dropout > 0:
        bits = batch.sequences * batch.longest * net.directions * net.width
        parts += [-(-bits // 8)] * ((net.layers - 1) * net.directions)
    return _HEADER + sum(-(-part // _SECTION) * _SECTION for part in parts)


@shape_rule("aten::_cudnn_rnn")
def _cudnn_rnn(
    tensor: Any, weights: Any, _stride: int, buffer: Any, hx: Any, cx: Any, mode: int, hidden: int, projected: int,
    layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool, sizes: Any, _state: Any,
) -> Any:  # fmt: skip
    """The output, the last states, the reserve space (in training only), and the flat weights that were read."""
    if not are_plain(tensor, hx, cx, buffer, *weights) or tensor.dim() != (2 if sizes else 3):
        return NotImplemented
    net = Net(mode, tensor.shape[-1], hidden, projected, layers, bidirectional)
    features = net.width * net.directions
    if sizes:
        batch = Batch(sizes[0], len(sizes), tensor.shape[0])
        output = empty((batch.steps, features), tensor.dtype)
    else:
        longest, sequences = (tensor.shape[1], tensor.shape[0]) if batch_first else tensor.shape[:2]
        batch = Batch(sequences, longest, sequences * longest)
        # Time-major in memory, whatever the order of its dimensions.
        output = empty((longest, sequences, features), tensor.dtype)
    if tuple(hx.shape) != (layers * net.directions, batch.sequences, net.width):
        return NotImplemented
    return (
        output.transpose(0, 1) if batch_first and not sizes else output,
        empty(hx.shape, hx.dtype),
        empty((0,) if cx is None else cx.shape, hx.dtype),
        empty((reserve_bytes(net, batch, tensor.element_size(), dropout) if train else 0,), torch.uint8),
        empty((weight_elements(net),), tensor.dtype) if buffer is None else buffer,
    )


@shape_rule("aten::_cudnn_rnn_backward")
def _cudnn_rnn_backward(
    tensor: Any, weights: Any, stride: int, _buffer: Any, hx: Any, cx: Any, _output: Any, grad: Any, grad_h: Any,
    grad_c: Any, mode: int, hidden: int, projected: int, layers: int, batch_first: bool, _dropout: float, train: bool,
    bidirectional: bool, sizes: Any, _state: Any, _reserve: Any, mask: Any,
) -> Any:  # fmt: skip
    """The states' gradients are made whether wanted or not; the weights' lie in one buffer, as the weights do."""
    if grad is None and grad_h is None and grad_c is None:
        return None, None, None, [None] * len(weights)
    if not train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    if not are_plain(tensor, hx, cx, *weights):
        return NotImplemented
    net = Net(mode, tensor.shape[-1], hidden, projected, layers, bidirectional)
    swaps = batch_first and not sizes
    gradient = empty(tensor.transpose(0, 1).shape if swaps else tensor.shape, tensor.dtype)
    return (
        gradient.transpose(0, 1) if swaps else gradient,
        empty(hx.shape, hx.dtype),
        None if cx is None else empty(cx.shape, cx.dtype),
        _weight_gradients(weights, net, stride) if mask[3] else [],
    )


def _weight_gradients(weights: Any, net: Net, stride: int) -> list[Tensor]:
    """Parts of one buffer; tensors of their own where the layers lack the biases for which the buffer has room."""
    if stride in (2, 3):
        return [empty(weight.shape, weight.dtype) for weight in weights]
    flat = empty((weight_elements(net),), weights[0].dtype).untyped_storage()
    gradients, offset = [], 0
    for weight in weights:
        gradients.append(empty((0,), weight.dtype).set_(flat, offset, weight.shape, contiguous(weight.shape)))
        offset += weight.numel()
    return gradients


# -- fused cells ------------------------------------------------------------------------------------------------------

_GRU_WORKSPACE = 5
"""Vectors that the GRU cell keeps."""


@shape_rule("aten::_thnn_fused_lstm_cell")
def _lstm_cell_returns(gates: Any, hidden_gates: Any, cx: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    """The new states, and the gates after their functions."""
    if not are_plain(gates, hidden_gates, cx, input_bias, hidden_bias) or gates.shape[-1] != 4 * cx.shape[-1]:
        return NotImplemented
    return empty(cx.shape, cx.dtype), empty(cx.shape, cx.dtype), empty(gates.shape, gates.dtype)


@shape_rule("aten::_thnn_fused_lstm_cell_backward_impl")
def _lstm_cell_backward(grad_h: Any, grad_c: Any, cx: Any, _cy: Any, workspace: Any, has_bias: bool) -> Any:
    if grad_h is None and grad_c is None:
        return None, None, None
    if not are_plain(grad_h, grad_c, cx, workspace):
        return NotImplemented
    return like(workspace), like(cx), empty(workspace.shape[1:], workspace.dtype) if has_bias else None


@shape_rule("aten::_thnn_fused_gru_cell")
def _gru_cell_returns(gates: Any, hidden_gates: Any, hx: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    if not are_plain(gates, hidden_gates, hx, input_bias, hidden_bias) or gates.shape[-1] != 3 * hx.shape[-1]:
        return NotImplemented
    return empty(hx.shape, hx.dtype), empty((hx.shape[0], _GRU_WORKSPACE * hx.shape[1]), hx.dtype)


@shape_rule("aten::_thnn_fused_gru_cell_backward")
def _gru_cell_backward(grad: Any, workspace: Any, has_bias: bool) -> Any:
    if not are_plain(grad, workspace):
        return NotImplemented
    rows, size = workspace.shape[0], 3 * (workspace.shape[1] // _GRU_WORKSPACE)
    gates = empty((rows, size), workspace.dtype), empty((rows, size), workspace.dtype)
    biases = (empty((size,), workspace.dtype), empty((size,), workspace.dtype)) if has_bias else (None, None)
    return *gates, like(grad), *biases
