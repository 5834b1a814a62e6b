"""CUDA's recurrent layers: one cuDNN call for LSTM, GRU and RNN, and fused LSTM and GRU cells.

cuDNN reads the weights from one flat buffer. A recurrent module's own parameters lie in one on a GPU, and cost nothing
more; weights that are computed, and all of bfloat16, which `flatten_parameters` passes over, are copied into one at
every call. Under autocast the weights are copied into a float16 buffer at every call, also where the region's dtype is
bfloat16. `memsize.kernels.rnn` says what the kernels return and keep.

Source: aten/src/ATen/native/RNN.cpp (`use_cudnn`, the fused cells), aten/src/ATen/cudnn/AutocastRNN.cpp,
torch/nn/modules/rnn.py. Limit: where cuDNN does not take the call, the layers' steps are those of other devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memsize.cuda import autocast
from memsize.kernels.rnn import MODES
from memsize.kernels.semantics import Semantics, current
from memsize.known_values.values import constant_of
from memsize.torch_internals.dispatch_key import Kernel, key_excluded, overload
from memsize.torch_internals.meta import is_meta

_BFLOAT16_CUDNN, _BFLOAT16_CAPABILITY = 91300, (8, 0)


def kernels() -> Mapping[str, Kernel]:
    """The kernels of the recurrent layers, padded (``.input``) and packed (``.data``), and of the fused cells."""
    whole: dict[str, Kernel] = {f"{name}.{form}": _layers(name, form) for name in MODES for form in ("input", "data")}
    return {**whole, "lstm_cell": _cell("lstm"), "gru_cell": _cell("gru")}


# -- whole layers -----------------------------------------------------------------------------------------------------


def _layers(name: str, form: str) -> Kernel:
    def kernel(*args: Any) -> Any:
        semantics = current()
        with key_excluded:
            if semantics is not None and _takes_cudnn(args[0], semantics):
                outputs = _cudnn(name, form, semantics, *args)
                if outputs is not None:
                    return outputs[: 3 if name == "lstm" else 2]
            if not (is_meta(args[0]) or (semantics is not None and semantics.is_stand_in(args[0]))):
                return overload(f"{name}.{form}")(*args)
        # The operator is a composite: what it calls is seen again, and cast by autocast.
        return getattr(getattr(torch.ops.aten, name), form).decompose(*args)

    return kernel


def _takes_cudnn(tensor: Tensor, semantics: Semantics) -> bool:
    """Whether cuDNN takes this input. A CPU tensor can stand for a GPU's, but cuDNN could not run it."""
    if not (semantics.is_stand_in(tensor) and tensor.numel() and torch._C._get_cudnn_enabled()):
        return False
    if tensor.dtype is torch.bfloat16:
        return semantics.cudnn >= _BFLOAT16_CUDNN and semantics.capability >= _BFLOAT16_CAPABILITY
    return tensor.dtype in (torch.float16, torch.float32, torch.float64)


def _cudnn(name: str, form: str, semantics: Semantics, tensor: Tensor, *args: Any) -> Any:
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


# -- cells ------------------------------------------------------------------------------------------------------------


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
        weights = (input_weight, hidden_weight, input_bias, hidden_bias)
        first, state = hidden if is_lstm else (hidden, hidden)
        outputs = _fused(name, tensor, first, state, weights)
        if outputs is not None:
            return outputs[:2] if is_lstm else outputs[0]
        with key_excluded:
            return overload(f"{name}_cell")(tensor, hidden, *weights)

    return kernel


def _fused(name: str, tensor: Tensor, hidden: Tensor, state: Tensor, weights: tuple[Tensor | None, ...]) -> Any:
    """Return what the fused kernel returns; None where it does not run: on the CPU, and, for a GRU, outside a trace."""
    semantics = current()
    if semantics is None or not semantics.is_stand_in(tensor):
        return None
    input_weight, hidden_weight, *biases = weights
    assert input_weight is not None and hidden_weight is not None
    try:
        with key_excluded:
            gates = tensor.matmul(input_weight.t()), hidden.matmul(hidden_weight.t())
            return overload(f"_thnn_fused_{name}_cell")(*gates, state, *biases)
    except NotImplementedError:
        return None
