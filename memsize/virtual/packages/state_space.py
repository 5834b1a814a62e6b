"""causal_conv1d and mamba_ssm: their compiled kernels, and the functions and the layer of Mamba above them.

The kernels (`causal_conv1d_cuda`, `selective_scan_cuda`) are there for the packages' own Python code too, where that is
installed without them: all of its layers run then.

Source: causal-conv1d 1.6, `cpp_functions.py` and `causal_conv1d_interface.py`; mamba 2.3, `csrc/selective_scan/
selective_scan.cpp`, `ops/selective_scan_interface.py` and `modules/mamba_simple.py`. Known limit: the workspace of
deterministic convolutions is not counted.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

_CHUNK: Final = 2048
"""Tokens after which the scan keeps its state."""


# -- compiled kernels --------------------------------------------------------------------------------------------------


def _writes(*_: Any) -> None:
    """A kernel that writes to tensors that are there."""


def scan(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Any, z: Tensor | None, bias: Any, softplus: bool
) -> list[Tensor]:
    """The forward: the output, the state after each chunk, and the output times the gate."""
    out = torch.empty_like(delta)
    chunks = -(-u.shape[2] // _CHUNK)
    states = u.new_empty((*u.shape[:2], chunks, 2 * a.shape[1]), dtype=a.dtype)
    return [out, states] if z is None else [out, states, torch.empty_like(z)]


def scan_backward(
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    _gradient: Tensor,
    _states: Tensor,
    out: Tensor | None,
    of_gate: Tensor | None,
    softplus: bool,
    recomputes: bool,
) -> list[Any]:
    """The gradients of all, where `of_gate` may be there; `recomputes` adds the gated output."""
    if z is not None and of_gate is None:
        of_gate = torch.empty_like(z)
    gated = torch.empty_like(out) if recomputes and out is not None else None
    result: list[Any] = [torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(a)]
    # Selective matrices collect their gradients in float32.
    sums = [torch.zeros_like(tensor, dtype=torch.float32 if tensor.dim() > 2 else None) for tensor in (b, c)]
    others = [None if tensor is None else torch.zeros_like(tensor) for tensor in (d, bias)]
    result += [total.to(tensor.dtype) for total, tensor in zip(sums, (b, c), strict=True)]
    return [*result, *others, *(tensor for tensor in (of_gate, gated) if tensor is not None)]


# -- causal_conv1d -----------------------------------------------------------------------------------------------------


def of_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, of_x: Tensor | None = None) -> list[Any]:
    """The gradients of a convolution, whose sums are of float32."""
    of_x = torch.empty_like(x) if of_x is None else of_x
    of_weight = torch.zeros_like(weight, dtype=torch.float32)
    of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    of_weight = of_weight.type_as(weight)
    return [of_x, of_weight, None if of_bias is None or bias is None else of_bias.type_as(bias)]


class _Convolution(torch.autograd.Function):
    """``[batch, channels, length]`` with a filter for each channel. Its input is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, start: Tensor | None) -> Tensor:
        x = x if 1 in (x.stride(1), x.stride(2)) else x.contiguous()
        ctx.save_for_backward(x, weight, bias, start)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, start = ctx.saved_tensors
        gradient = gradient if 1 in (gradient.stride(1), gradient.stride(2)) else gradient.contiguous()
        of_start = torch.empty_like(start) if ctx.needs_input_grad[3] else None
        return *of_convolution(x, weight, bias), of_start


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """A causal convolution, with SiLU or without."""
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError("activation must be None, silu, or swish")
    out = _Convolution.apply(x, weight, bias, initial_states)  # type: ignore[no-untyped-call]
    if not return_final_states:
        return out
    last = x.new_empty((x.shape[0], weight.shape[1] - 1, x.shape[1])).transpose(1, 2)
    return out, last if final_states_out is None else final_states_out


def causal_conv1d_update(x: Tensor, conv_state: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """A convolution of new tokens; the state is written in place."""
    return torch.empty_like(x)


# -- mamba_ssm ---------------------------------------------------------------------------------------------------------


class _Scan(torch.autograd.Function):
    """The selective scan of ``[batch, channels, length]``."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> tuple[Tensor, Tensor]:
        u, delta, a, b, c, d, z, bias = (
            tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors
        )
        b, c = (tensor.unsqueeze(1) if tensor.dim() == 3 else tensor for tensor in (b, c))
        out, states, *gated = scan(u, delta, a, b, c, d, z, bias, True)
        ctx.dims = [tensors[3].dim(), tensors[4].dim()]
        ctx.save_for_backward(u, delta, a, b, c, d, z, bias, states, out if gated else None)
        last = states[:, :, -1, 1::2]
        ctx.mark_non_differentiable(last)
        ctx.set_materialize_grads(False)
        return (gated[0] if gated else out), last

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        u, delta, a, b, c, d, z, bias, states, out = ctx.saved_tensors
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        parts = scan_backward(u, delta, a, b, c, d, z, bias, gradient, states, out, None, True, False)
        of_u, of_delta, of_a, of_b, of_c, of_d, of_bias, *of_gate = parts
        of_b, of_c = (
            tensor.squeeze(1) if dim == 3 else tensor for tensor, dim in zip((of_b, of_c), ctx.dims, strict=True)
        )
        return of_u, of_delta, of_a, of_b, of_c, of_d, of_gate[0] if of_gate else None, of_bias


def selective_scan_fn(u: Tensor, delta: Tensor, *others: Any, **named: Any) -> Any:
    """The selective scan, and its last state if asked for."""
    options = dict.fromkeys(_SCANNED) | dict(zip(_SCANNED, others, strict=False)) | named
    out, last = _Scan.apply(u, delta, *(options[name] for name in _SCANNED[:6]))  # type: ignore[no-untyped-call]
    return (out, last) if options["return_last_state"] else out


_SCANNED: Final = ("A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state")


class _Inner(torch.autograd.Function):
    """All of Mamba between its two outer products. The convolution and `delta` are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        xz: Tensor,
        filters: Tensor,
        filter_bias: Tensor | None,
        to_parts: Tensor,
        to_delta: Tensor,
        to_out: Tensor,
        out_bias: Tensor | None,
        a: Tensor,
        d: Tensor | None,
        delta_bias: Tensor | None,
    ) -> Tensor:
        if torch.is_autocast_enabled("cuda"):
            half = torch.get_autocast_dtype("cuda")
            to_parts, to_delta, to_out = to_parts.to(half), to_delta.to(half), to_out.to(half)
            out_bias = None if out_bias is None else out_bias.to(half)
        xz = xz if xz.stride(-1) == 1 else xz.contiguous()
        rank, size = to_delta.shape[1], a.shape[1]
        x, z = xz.chunk(2, dim=1)
        convolved = torch.empty_like(x)
        parts = functional.linear(_by_token(convolved), to_parts)
        delta = _by_channel(to_delta @ parts[:, :rank].t(), x)
        b, c = (_by_state(part, x) for part in (parts[:, rank : rank + size], parts[:, -size:]))
        out, states, gated = scan(convolved, delta, a, b, c, d, z, delta_bias, True)
        del convolved, delta
        ctx.save_for_backward(
            xz, filters, filter_bias, parts, to_parts, to_delta, to_out, a, b, c, d, delta_bias, states, out
        )
        ctx.has_bias = out_bias is not None
        return functional.linear(gated.transpose(1, 2), to_out, out_bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        xz, filters, filter_bias, parts, to_parts, to_delta, to_out, a, b, c, d, delta_bias, states, out = (
            ctx.saved_tensors
        )
        rank, size = to_delta.shape[1], a.shape[1]
        x, z = xz.chunk(2, dim=1)
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        convolved = torch.empty_like(x)
        delta = _by_channel(to_delta @ parts[:, :rank].t(), x)
        of_xz = torch.empty_like(xz)
        of_x, of_z = of_xz.chunk(2, dim=1)
        gradient = gradient.flatten(0, 1).t()
        of_gated = _by_channel(to_out.t() @ gradient, x)
        of_convolved, of_delta, of_a, of_b, of_c, of_d, of_delta_bias, of_z, gated = scan_backward(
            convolved, delta, a, b, c, d, z, delta_bias, of_gated, states, out, of_z, True, True
        )
        of_to_out = gradient @ _by_token(gated)
        of_out_bias = gradient.sum(dim=1) if ctx.has_bias else None
        of_parts = torch.empty_like(parts)
        of_b = of_b.squeeze(1).transpose(1, 2).flatten(0, 1).contiguous()
        of_parts[:, rank : rank + size] = of_b
        del of_b
        of_c = of_c.squeeze(1).transpose(1, 2).flatten(0, 1).contiguous()
        of_parts[:, -size:] = of_c
        del of_c
        of_delta = of_delta.transpose(0, 1).flatten(1)
        of_to_delta = of_delta @ parts[:, :rank]
        of_parts[:, :rank] = of_delta.t() @ to_delta
        rows = of_convolved.transpose(0, 1).flatten(1)
        of_to_parts = of_parts.t() @ _by_token(convolved)
        torch.addmm(rows, to_parts.t(), of_parts.t(), out=rows)
        _, of_filters, of_filter_bias = of_convolution(x, filters.squeeze(1), filter_bias, of_x)
        of_filters = of_filters.unsqueeze(1)
        return (
            *(of_xz, of_filters, of_filter_bias, of_to_parts, of_to_delta, of_to_out, of_out_bias),
            *(of_a, of_d, of_delta_bias),
        )


def _by_token(tensor: Tensor) -> Tensor:
    """``[batch, channels, length]`` as ``[batch · length, channels]``: a copy, unless channels come first in memory."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _by_channel(product: Tensor, like: Tensor) -> Tensor:
    """``[channels, batch · length]`` as ``[batch, channels, length]``."""
    return product.view(len(product), like.shape[0], like.shape[2]).transpose(0, 1)


def _by_state(part: Tensor, like: Tensor) -> Tensor:
    return part.view(like.shape[0], like.shape[2], -1).transpose(1, 2).unsqueeze(1).contiguous()


def mamba_inner_fn(xz: Tensor, *others: Any, **named: Any) -> Any:
    """Convolution, projections, scan and gate of Mamba with B and C that depend on the input."""
    arguments = dict.fromkeys(_INNER) | dict(zip(_INNER, others, strict=False)) | named
    passed = (arguments[name] for name in _INNER if name not in ("B", "C"))
    return _Inner.apply(xz, *passed)  # type: ignore[no-untyped-call]


_INNER: Final = (
    *("conv1d_weight", "conv1d_bias", "x_proj_weight", "delta_proj_weight", "out_proj_weight", "out_proj_bias"),
    *("A", "B", "C", "D", "delta_bias"),
)


class Mamba(nn.Module):
    """The layer of Mamba on ``[batch, length, width]``."""

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | str = "auto",
        conv_bias: bool = True,
        bias: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        inner = int(expand * d_model)
        rank = math.ceil(d_model / 16) if isinstance(dt_rank, str) else dt_rank
        self.d_model, self.d_state, self.d_conv, self.expand, self.d_inner = d_model, d_state, d_conv, expand, inner
        self.dt_rank, self.layer_idx = rank, layer_idx
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=bias, **options)
        self.conv1d = nn.Conv1d(inner, inner, d_conv, groups=inner, padding=d_conv - 1, bias=conv_bias, **options)
        self.x_proj = nn.Linear(inner, rank + 2 * d_state, bias=False, **options)
        self.dt_proj = nn.Linear(rank, inner, bias=True, **options)
        states = torch.arange(1, d_state + 1, dtype=torch.float32, device=device)
        self.A_log = nn.Parameter(states.repeat(inner, 1).log())
        self.D = nn.Parameter(torch.ones(inner, device=device))
        self.out_proj = nn.Linear(inner, d_model, bias=bias, **options)

    def forward(self, hidden_states: Tensor, inference_params: Any = None) -> Any:
        batch, length, _ = hidden_states.shape
        xz = self.in_proj.weight @ hidden_states.flatten(0, 1).t()
        xz = xz.view(-1, batch, length).transpose(0, 1)
        if self.in_proj.bias is not None:
            xz = xz + self.in_proj.bias.to(xz.dtype).unsqueeze(1)
        return mamba_inner_fn(
            xz,
            self.conv1d.weight,
            self.conv1d.bias,
            self.x_proj.weight,
            self.dt_proj.weight,
            self.out_proj.weight,
            self.out_proj.bias,
            -torch.exp(self.A_log.float()),
            D=self.D.float(),
            delta_bias=self.dt_proj.bias.float(),
        )


_INTERFACE: Final = {"selective_scan_fn": selective_scan_fn, "mamba_inner_fn": mamba_inner_fn}
_CONVOLUTIONS: Final = {"causal_conv1d_fn": causal_conv1d_fn, "causal_conv1d_update": causal_conv1d_update}
KERNELS: Final[dict[str, dict[str, Any]]] = {
    "selective_scan_cuda": {"fwd": scan, "bwd": scan_backward},
    "causal_conv1d_cuda": dict.fromkeys(("causal_conv1d_fwd", "causal_conv1d_bwd", "causal_conv1d_update"), _writes),
}
"""Compiled modules, which the packages' own code imports."""
MODULES: Final[dict[str, dict[str, Any]]] = {
    "causal_conv1d": {"__version__": "1.6.1", **_CONVOLUTIONS},
    "causal_conv1d.causal_conv1d_interface": _CONVOLUTIONS,
    "mamba_ssm": {"__version__": "2.3.2", "Mamba": Mamba, **_INTERFACE},
    "mamba_ssm.modules": {},
    "mamba_ssm.modules.mamba_simple": {"Mamba": Mamba},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.selective_scan_interface": _INTERFACE,
}
