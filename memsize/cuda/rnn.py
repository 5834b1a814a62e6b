"""CUDA's recurrent layers: one cuDNN call for LSTM, GRU and RNN, and fused LSTM and GRU cells.

cuDNN keeps one reserve space instead of every step's gates. Its size has no published formula: the one here was found
by asking the library (`cudnnGetRNNTempSpaceSizes` of cuDNN 9.19 and 9.24, on a machine without a GPU), and agrees with
it to the byte over some thousand shapes. It has not been measured on a GPU yet.

cuDNN reads the weights from one flat buffer. A recurrent module's own parameters lie in one on a GPU, and cost nothing
more; weights that are computed, and all of bfloat16, which `flatten_parameters` passes over, are copied into one at
every call. Under autocast the weights are copied into a float16 buffer at every call, also where the region's dtype is
bfloat16.

Source: aten/src/ATen/native/RNN.cpp (`use_cudnn`, the fused cells), aten/src/ATen/native/cudnn/RNN.cpp,
aten/src/ATen/native/cuda/RNN.cu, aten/src/ATen/cudnn/AutocastRNN.cpp, torch/nn/modules/rnn.py.
Limits: cuDNN's workspace, its dropout state (a few MiB, once per process) and the copies that it makes of inputs which
are not row-major are not counted. Where cuDNN does not take the call, the layers' steps are those of other devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memsize.cuda import autocast
from memsize.cuda.semantics import Semantics, current
from memsize.meta_kernels.registry import shape_rule
from memsize.meta_kernels.strides import Shape, contiguous
from memsize.meta_kernels.tensors import are_plain, empty, like
from memsize.torch_internals.dispatch_key import Kernel, key_excluded, overload
from memsize.torch_internals.meta import is_meta

_RELU, _TANH, _LSTM, _GRU = range(4)
MODES = {"rnn_relu": _RELU, "rnn_tanh": _TANH, "lstm": _LSTM, "gru": _GRU}
"""cuDNN's number of each kind of layer."""

_BFLOAT16_CUDNN, _BFLOAT16_CAPABILITY = 91300, (8, 0)


class Layers(NamedTuple):
    """The arguments that the recurrent operators share."""

    has_biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool


def kernels() -> Mapping[str, Kernel]:
    """The kernels of the recurrent layers, padded (``.input``) and packed (``.data``), and of the fused cells."""
    whole: dict[str, Kernel] = {f"{name}.{form}": _layers(name, form) for name in MODES for form in ("input", "data")}
    return {**whole, "lstm_cell": _lstm_cell, "gru_cell": _gru_cell}


# -- whole layers -----------------------------------------------------------------------------------------------------


def _layers(name: str, form: str) -> Kernel:
    """The kernel of ``lstm.input`` and its relatives."""
    run = _run_padded if form == "input" else _run_packed

    def kernel(*args: Any) -> Any:
        semantics = current()
        with key_excluded:
            if semantics is not None and _takes_cudnn(args[0], semantics):
                found = run(MODES[name], semantics, *args)
                if found is not None:
                    return found[: 3 if name == "lstm" else 2]
            if not is_meta(args[0]):
                return overload(f"{name}.{form}")(*args)
        # The operator is a composite: what it calls is seen again, and cast by autocast.
        return getattr(getattr(torch.ops.aten, name), form).decompose(*args)

    return kernel


def _takes_cudnn(tensor: Tensor, semantics: Semantics) -> bool:
    """Whether cuDNN takes this input. A CPU tensor can stand for a GPU's, but cuDNN could not run it."""
    if not (semantics.meta and is_meta(tensor) and tensor.numel() and torch._C._get_cudnn_enabled()):
        return False
    if tensor.dtype is torch.bfloat16:
        return semantics.cudnn >= _BFLOAT16_CUDNN and semantics.capability >= _BFLOAT16_CAPABILITY
    return tensor.dtype in (torch.float16, torch.float32, torch.float64)


def _run_padded(
    mode: int, semantics: Semantics, tensor: Tensor, hidden: Any, weights: list[Tensor], *options: Any
) -> Any:
    *shared, batch_first = options
    return _cudnn(mode, semantics, tensor, hidden, weights, Layers(*shared), batch_first, [])


def _run_packed(
    mode: int,
    semantics: Semantics,
    tensor: Tensor,
    batch_sizes: Tensor,
    hidden: Any,
    weights: list[Tensor],
    *options: Any,
) -> Any:
    sizes = _values(batch_sizes)
    return None if sizes is None else _cudnn(mode, semantics, tensor, hidden, weights, Layers(*options), False, sizes)


def _values(sizes: Tensor) -> list[int] | None:
    """How many sequences take part in each step; None where only the data could tell."""
    if not is_meta(sizes):
        return sizes.tolist()
    from memsize.known_values.values import constant_of

    value = constant_of(sizes)
    return None if value is None else value.tolist()


def _cudnn(
    mode: int,
    semantics: Semantics,
    tensor: Tensor,
    hidden: Any,
    weights: list[Tensor],
    options: Layers,
    batch_first: bool,
    sizes: list[int],
) -> Any:
    """The outputs of `_cudnn_rnn`, or None where PyTorch should say what is wrong with the arguments."""
    first, cell = hidden if isinstance(hidden, (list, tuple)) else (hidden, None)
    width, projected = _widths(first, cell)
    stride = (4 if options.has_biases else 2) + (projected > 0)
    buffer = _flat_storage(weights)
    if autocast.active() is not None:
        weights, buffer = _recast(weights, buffer, stride, semantics)
        cell = None if cell is None else autocast.cast(cell, torch.float16, semantics)
        first = autocast.cast(first, torch.float16, semantics)
        tensor = autocast.cast(tensor, torch.float16, semantics)
    states = [state for state in (tensor, first, cell) if state is not None]
    if any(other.dtype is not tensor.dtype for other in (*states, *weights)):
        return None
    shape = (mode, width, projected, options.layers, batch_first, options.dropout, options.train, options.bidirectional)
    return overload("_cudnn_rnn")(tensor, weights, stride, buffer, first, cell, *shape, sizes, None)


def _widths(hidden: Tensor, cell: Tensor | None) -> tuple[int, int]:
    """The hidden size, and the projected one (0 where nothing is projected)."""
    if cell is None or cell.shape[-1] == hidden.shape[-1]:
        return hidden.shape[-1], 0
    return cell.shape[-1], hidden.shape[-1]


def _flat_storage(weights: list[Tensor]) -> Tensor | None:
    """What stands for the flat buffer that holds the weights; None where there is no such buffer."""
    is_flat = all(isinstance(w, torch.nn.Parameter) and w.dtype is not torch.bfloat16 for w in weights)
    return weights[0].detach() if is_flat else None


def _recast(
    weights: list[Tensor], buffer: Tensor | None, stride: int, semantics: Semantics
) -> tuple[list[Tensor], Tensor | None]:
    """The weights as parts of one new float16 buffer, through which their gradients come back; and that buffer."""
    given = weights[0].dtype
    if given in (torch.float16, torch.float64) or any(w.dtype is not given for w in weights):
        return weights, buffer
    flat = torch.zeros(_flat_length(weights, stride), dtype=torch.float16, device=weights[0].device)
    parts = list(_copied(weights, flat))
    if semantics.observer is not None:
        for weight, part in zip(weights, parts, strict=True):
            semantics.observer(weight, part)
    return parts, flat


def _copied(weights: Sequence[Tensor], flat: Tensor) -> Iterator[Tensor]:
    """Each weight's copy in `flat`, a tensor of its own and no view in autograd's eyes."""
    place = 0
    for weight in weights:
        part = torch.empty(0, dtype=flat.dtype, device=flat.device)
        part.set_(flat.untyped_storage(), place, (weight.numel(), 1), (1, 1))
        yield part.copy_(weight.view_as(part) if weight.is_contiguous() else weight.reshape(part.shape))
        place += weight.numel()


def _flat_length(weights: Sequence[Tensor], stride: int) -> int:
    """Elements of cuDNN's buffer. It has room for biases also where the layers have none."""
    lacks_biases = stride in (2, 3)
    biases = sum(2 * weight.shape[0] for weight in weights[::stride]) if lacks_biases else 0
    return sum(weight.numel() for weight in weights) + biases


# -- cells ------------------------------------------------------------------------------------------------------------


def _lstm_cell(
    tensor: Tensor,
    hidden: list[Tensor],
    input_weight: Tensor,
    hidden_weight: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Any:
    weights = (input_weight, hidden_weight, input_bias, hidden_bias)
    found = _fused("lstm", tensor, hidden[0], hidden[1], weights)
    return _plain("lstm_cell", tensor, hidden, weights) if found is None else found[:2]


def _gru_cell(
    tensor: Tensor,
    hidden: Tensor,
    input_weight: Tensor,
    hidden_weight: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Any:
    weights = (input_weight, hidden_weight, input_bias, hidden_bias)
    found = _fused("gru", tensor, hidden, hidden, weights)
    return _plain("gru_cell", tensor, hidden, weights) if found is None else found[0]


def _fused(name: str, tensor: Tensor, hidden: Tensor, state: Tensor, weights: tuple[Tensor | None, ...]) -> Any:
    """What the fused kernel returns; None where it does not run: on the CPU, and, for a GRU, outside of a trace."""
    semantics = current()
    if semantics is None or not (semantics.meta and is_meta(tensor)):
        return None
    input_weight, hidden_weight, *biases = weights
    assert input_weight is not None and hidden_weight is not None
    try:
        with key_excluded:
            gates = tensor.matmul(input_weight.t()), hidden.matmul(hidden_weight.t())
            return overload(f"_thnn_fused_{name}_cell")(*gates, state, *biases)
    except NotImplementedError:
        return None


def _plain(name: str, tensor: Tensor, hidden: Any, weights: tuple[Tensor | None, ...]) -> Any:
    with key_excluded:
        return overload(name)(tensor, hidden, *weights)


# -- what the kernels return and keep ---------------------------------------------------------------------------------


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
    each = gates * (net.width + 2) + net.projected * net.hidden
    return net.directions * sum(gates * size + each for size in read)


def reserve_bytes(net: Net, batch: Batch, size: int, dropout: float) -> int:
    """Bytes of the reserve space for values of `size` bytes.

    Kept for each step, layer and direction: an LSTM's 4 gates and its cell state (projected: the unprojected and the
    projected output too), 6 vectors of a GRU, the output of a plain RNN; between layers the output in full width, and
    of each dropout mask one bit per element that the next layer's directions read.
    """
    cells = batch.steps * net.layers * net.directions * size
    state = cells * net.hidden
    kept = {_LSTM: [4 * state, state], _GRU: [6 * state]}.get(net.mode, [state])
    if net.projected:
        kept += [state, cells * net.projected]
    kept.append(batch.steps * (net.layers - 1) * net.directions * net.hidden * size)
    if dropout > 0:
        bits = batch.sequences * batch.longest * net.directions * net.width
        kept += [-(-bits // 8)] * ((net.layers - 1) * net.directions)
    return _HEADER + sum(-(-part // _SECTION) * _SECTION for part in kept)


def _net(tensor: Tensor, mode: int, hidden: int, projected: int, layers: int, bidirectional: bool) -> Net:
    return Net(mode, tensor.shape[-1], hidden, projected, layers, bidirectional)


def _batch(tensor: Tensor, batch_first: bool, sizes: Shape) -> Batch:
    if sizes:
        return Batch(sizes[0], len(sizes), tensor.shape[0])
    longest, sequences = (tensor.shape[1], tensor.shape[0]) if batch_first else tensor.shape[:2]
    return Batch(sequences, longest, sequences * longest)


def _output(tensor: Tensor, net: Net, batch: Batch, batch_first: bool, is_packed: bool) -> Tensor:
    """Time-major in memory, whatever the order of its dimensions."""
    features = net.width * net.directions
    if is_packed:
        return empty((batch.steps, features), tensor.dtype)
    result = empty((batch.longest, batch.sequences, features), tensor.dtype)
    return result.transpose(0, 1) if batch_first else result


@shape_rule("aten::_cudnn_rnn")
def _cudnn_rnn(
    tensor: Any, weights: Any, _stride: int, buffer: Any, hx: Any, cx: Any, mode: int, hidden: int, projected: int,
    layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool, sizes: Any, _state: Any,
) -> Any:  # fmt: skip
    """The output, the last states, the reserve space (in training only), and the flat weights that were read."""
    if not are_plain(tensor, hx, cx, buffer, *weights) or tensor.dim() != (2 if sizes else 3):
        return NotImplemented
    net, batch = _net(tensor, mode, hidden, projected, layers, bidirectional), _batch(tensor, batch_first, sizes)
    if tuple(hx.shape) != (layers * net.directions, batch.sequences, net.width):
        return NotImplemented
    return (
        _output(tensor, net, batch, batch_first, bool(sizes)),
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
    net = _net(tensor, mode, hidden, projected, layers, bidirectional)
    swaps = batch_first and not sizes
    given = empty(tensor.transpose(0, 1).shape if swaps else tensor.shape, tensor.dtype)
    return (
        given.transpose(0, 1) if swaps else given,
        empty(hx.shape, hx.dtype),
        None if cx is None else empty(cx.shape, cx.dtype),
        _weight_gradients(weights, net, stride) if mask[3] else [],
    )


def _weight_gradients(weights: Any, net: Net, stride: int) -> list[Tensor]:
    """Parts of one buffer; tensors of their own where the layers lack the biases for which the buffer has room."""
    if stride in (2, 3):
        return [empty(weight.shape, weight.dtype) for weight in weights]
    flat = empty((weight_elements(net),), weights[0].dtype).untyped_storage()
    parts, place = [], 0
    for weight in weights:
        parts.append(empty((0,), weight.dtype).set_(flat, place, weight.shape, contiguous(weight.shape)))
        place += weight.numel()
    return parts


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
