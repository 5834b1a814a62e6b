"""mamba_ssm's Mamba-2 around its scan: the convolution, the gated norm and the output product as one, and the layer.

Source: mamba 2.3, `ops/triton/ssd_combined.py`, `ops/triton/layernorm_gated.py` and `modules/mamba2.py`. Known limit:
decoding from a cache is not simulated.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from memsize.virtual.packages.chunked_scan import Scan, mamba_chunk_scan_combined, scan_backward, scan_forward
from memsize.virtual.packages.state_space import MODULES as _OF_MAMBA, causal_conv1d_fn, of_convolution

# -- the gated norm ----------------------------------------------------------------------------------------------------


def _norm(x: Tensor, groups: int, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output of a norm of rows, and the reciprocal deviations."""
    out = torch.empty_like(x) if out is None else out
    return out, x.new_empty(groups * len(x), dtype=torch.float32)


def _of_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None, groups: int, of_z: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, the weight, the bias and the gate. Each program adds up its own rows of the weight's."""
    of_x = torch.empty_like(x)
    of_z = torch.empty_like(z) if of_z is None and z is not None else of_z
    width = x.shape[1] // groups
    warps = min(max(min(65536 // x.element_size(), 1 << (width - 1).bit_length()) // 256, 1), 8)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    rows = math.ceil(processors * math.ceil(4 / warps) / groups)
    sums = [None if of is None else of.new_empty((rows, x.shape[1]), dtype=torch.float32) for of in (weight, bias)]
    of_weight, of_bias = (
        None if total is None or of is None else total.sum(0).to(of.dtype)
        for total, of in zip(sums, (weight, bias), strict=True)
    )
    assert of_weight is not None
    return of_x, of_weight, of_bias, of_z


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None, groups: int) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        gate = None if z is None else z.reshape(-1, z.shape[-1])
        out, scales = _norm(rows, groups)
        ctx.groups = groups
        ctx.save_for_backward(rows, weight, bias, scales, gate)
        return out.reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weight, bias, _, gate = ctx.saved_tensors
        of_x, of_weight, of_bias, of_z = _of_norm(rows, weight, bias, gate, ctx.groups)
        shape = gradient.shape
        return of_x.reshape(shape), of_weight, of_bias, None if of_z is None else of_z.reshape(shape), None


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Any:
    """A norm of rows or of groups of their columns, times the gate `z` if there is one."""
    groups = x.shape[-1] // (group_size or x.shape[-1])
    return _GatedNorm.apply(x, weight, bias, z, groups)  # type: ignore[no-untyped-call]


class RMSNorm(nn.Module):
    """The gated norm of Mamba-2."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Any:
        return rmsnorm_fn(x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate)


# -- convolution, scan, norm and output product as one ----------------------------------------------------------------


class _Options(NamedTuple):
    chunk: int
    heads: int
    size: int
    groups: int
    state_dtype: torch.dtype | None


class _Split(NamedTuple):
    """The columns of Mamba-2's input product: a gated MLP's, the gate, what is convolved, and the steps."""

    mlp: Tensor
    z: Tensor
    convolved: Tensor
    dt: Tensor

    @classmethod
    def of(cls, tensor: Tensor, filters: Tensor, options: _Options) -> _Split:
        width = options.heads * options.size
        mlp = tensor.shape[-1] - width - len(filters) - options.heads
        return cls(*tensor.split([mlp, width, len(filters), options.heads], dim=-1))

    def scan(self, a: Tensor, d: Tensor, dt_bias: Tensor, first: Any, options: _Options, *, gated: bool) -> Scan:
        """The scan of what is convolved, which a convolution makes."""
        convolved = torch.empty_like(_aligned(self.convolved))
        x, b, c = _parts(convolved, options)
        z = _by_head(self.z, options) if gated else None
        return Scan(options.chunk, options.state_dtype, x, self.dt, a, b, c, d, z, dt_bias, first)


def _parts(convolved: Tensor, options: _Options) -> tuple[Tensor, Tensor, Tensor]:
    width = options.heads * options.size
    states = (convolved.shape[-1] - width) // 2
    x, b, c = convolved.split([width, states, states], dim=-1)
    return _by_head(x, options), *(part.unflatten(-1, (options.groups, -1)) for part in (b, c))


def _aligned(tensor: Tensor) -> Tensor:
    """``[batch, length, channels]`` as the convolution takes it: tokens begin at multiples of 8."""
    return tensor if tensor.stride(1) % 8 == 0 else tensor.contiguous()


def _by_head(tensor: Tensor, options: _Options) -> Tensor:
    return tensor.view(*tensor.shape[:-1], options.heads, options.size)


class _Combined(torch.autograd.Function):
    """All of Mamba-2 after its input product. The convolution and the scan are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        options: _Options,
        parts: Tensor,
        filters: Tensor,
        filter_bias: Tensor | None,
        dt_bias: Tensor,
        a: Tensor,
        d: Tensor,
        first: Tensor | None,
        norm: Tensor | None,
        to_out: Tensor | None,
        out_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        split = _Split.of(parts, filters, options)
        batch, length, mlp = split.mlp.shape
        scan = split.scan(a, d, dt_bias, first, options, gated=norm is None)
        out, ungated, _decay, last, _alive = scan_forward(scan)
        saved = out if ungated is None else ungated
        out, scales = out.flatten(2), None
        if norm is not None:
            whole = out.new_empty((batch, length, mlp // 2 + out.shape[2])) if mlp else None
            rows = None if whole is None else whole[..., mlp // 2 :].flatten(0, 1)
            out, scales = _norm(saved.flatten(2).flatten(0, 1), options.groups, rows)
            out = out.unflatten(0, (batch, length)) if whole is None else whole
        elif mlp:
            out = torch.cat([torch.empty_like(split.mlp[..., : mlp // 2]), out], dim=-1)
        if to_out is not None:
            if torch.is_autocast_enabled("cuda"):
                half = torch.get_autocast_dtype("cuda")
                out, to_out = out.to(half), to_out.to(half)
                out_bias = None if out_bias is None else out_bias.to(half)
            out = functional.linear(out, to_out, out_bias)
        ctx.options = options
        ctx.save_for_backward(parts, filters, filter_bias, saved, a, d, dt_bias, first, norm, scales, to_out, out_bias)
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        parts, filters, filter_bias, saved, a, d, dt_bias, first, norm, _scales, to_out, out_bias = ctx.saved_tensors
        options: _Options = ctx.options
        split = _Split.of(parts, filters, options)
        mlp, width = split.mlp.shape[-1] // 2, options.heads * options.size
        again = saved.new_empty((*saved.shape[:2], mlp + width)) if to_out is not None else None
        scan = split.scan(a, d, dt_bias, first, options, gated=norm is None)
        of_parts = torch.empty_like(parts)
        of_split = _Split.of(of_parts, filters, options)
        of_convolved = torch.empty_like(split.convolved)
        of_x, of_b, of_c = _parts(of_convolved, options)
        of_out = gradient
        if to_out is not None:
            gradient = functional.linear(gradient, to_out.t())
        of_product = gradient = _by_head(gradient[..., mlp:], options)
        of_norm, of_z = None, None
        if norm is None:
            of_z = _by_head(of_split.z, options)
        else:
            rows = saved.flatten(2).flatten(0, 1)
            z = split.z.flatten(0, 1)
            gradient, of_norm, *_ = _of_norm(rows, norm, None, z, options.groups, of_split.z)
            gradient = _by_head(gradient.unflatten(0, saved.shape[:2]), options)
        gradients = scan_backward(
            scan,
            gradient,
            of_x=of_x,
            of_dt=of_split.dt,
            of_b=of_b,
            of_c=of_c,
            of_z=of_z,
            recomputes=to_out is not None and norm is None,
        )
        of_to_out, of_out_bias = None, None
        if to_out is not None:
            product = again if norm is not None or gradients.gated is None else gradients.gated.flatten(2)
            of_to_out = torch.einsum("bso,bsd->od", of_out, product)
            of_out_bias = None if out_bias is None else of_out.sum(dim=(0, 1))
        x, of_x = (_aligned(tensor).transpose(1, 2) for tensor in (split.convolved, of_split.convolved))
        _, of_filters, of_filter_bias = of_convolution(x, filters, filter_bias, of_x)
        del of_product
        return (
            *(None, of_parts, of_filters, of_filter_bias, gradients.dt_bias, gradients.a, gradients.d),
            *(gradients.initial_states, of_norm, of_to_out, of_out_bias),
        )


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """Convolution, scan, norm and output product of Mamba-2, and the last states if asked for."""
    size = D.shape[1] if D.dim() == 2 else headdim
    if size is None:
        raise ValueError("headdim is missing: D has one value for each head")
    out, last = _Combined.apply(  # type: ignore[no-untyped-call]
        _Options(chunk_size, len(D), size, ngroups, state_dtype),
        *(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states),
        *(rmsnorm_weight, outproj_weight, outproj_bias),
    )
    return (out, last) if return_final_states else out


class Mamba2(nn.Module):
    """The layer of Mamba-2 on ``[batch, length, width]``."""

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),  # noqa: N803
        D_has_hdim: bool = False,  # noqa: N803
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        *_: Any,
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **__: Any,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model, self.d_state, self.d_conv, self.expand, self.headdim = d_model, d_state, d_conv, expand, headdim
        self.d_inner = expand * d_model
        self.d_ssm, self.ngroups, self.chunk_size = d_ssm or self.d_inner, ngroups, chunk_size
        self.nheads = self.d_ssm // headdim
        self.rmsnorm, self.use_mem_eff_path, self.layer_idx = rmsnorm, use_mem_eff_path, layer_idx
        self.D_has_hdim = D_has_hdim
        convolved = self.d_ssm + 2 * ngroups * d_state
        columns = 2 * self.d_inner + 2 * ngroups * d_state + self.nheads
        self.in_proj = nn.Linear(d_model, columns, bias=bias, **options)
        self.conv1d = nn.Conv1d(
            convolved, convolved, d_conv, groups=convolved, padding=d_conv - 1, bias=conv_bias, **options
        )
        self.act = nn.SiLU()
        self.dt_bias = nn.Parameter(torch.rand(self.nheads, **options))
        self.A_log = nn.Parameter(torch.empty(self.nheads, device=device).uniform_(*A_init_range).log().to(dtype=dtype))
        self.D = nn.Parameter(torch.ones(self.d_ssm if D_has_hdim else self.nheads, device=device))
        if rmsnorm:
            self.norm = RMSNorm(self.d_ssm, 1e-5, self.d_ssm // ngroups, norm_before_gate, **options)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **options)

    def forward(self, u: Tensor, seqlen: int | None = None, *_: Any, **__: Any) -> Any:
        parts = self.in_proj(u)
        if seqlen is not None:
            parts = parts.unflatten(0, (-1, seqlen))
        a = -torch.exp(self.A_log.float())
        d = self.D.view(-1, self.headdim) if self.D_has_hdim else self.D
        filters = self.conv1d.weight.squeeze(1)
        if self.use_mem_eff_path:
            out = mamba_split_conv1d_scan_combined(
                *(parts, filters, self.conv1d.bias, self.dt_bias, a, d, self.chunk_size),
                rmsnorm_weight=self.norm.weight if self.rmsnorm else None,
                outproj_weight=self.out_proj.weight,
                outproj_bias=self.out_proj.bias,
                headdim=self.headdim,
                ngroups=self.ngroups,
            )
            return out if seqlen is None else out.flatten(0, 1)
        options = _Options(self.chunk_size, self.nheads, self.headdim, self.ngroups, None)
        split = _Split.of(parts, filters, options)
        convolved = causal_conv1d_fn(split.convolved.transpose(1, 2), filters, self.conv1d.bias).transpose(1, 2)
        x, b, c = _parts(convolved, options)
        z = None if self.rmsnorm else _by_head(split.z, options)
        y = mamba_chunk_scan_combined(x, split.dt, a, b, c, self.chunk_size, d, z, self.dt_bias).flatten(2)
        if self.rmsnorm:
            y = self.norm(y, split.z)
        if split.mlp.shape[-1]:
            gate, rest = split.mlp.chunk(2, dim=-1)
            y = torch.cat([functional.silu(gate) * rest, y], dim=-1)
        return self.out_proj(y if seqlen is None else y.flatten(0, 1))


def selective_state_update(state: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """A scan of one token; the state is written in place."""
    return torch.empty_like(x)


_COMBINED: Final = {
    "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
    "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
}
MODULES: Final[dict[str, dict[str, Any]]] = {
    "mamba_ssm": {**_OF_MAMBA["mamba_ssm"], "Mamba2": Mamba2},
    "mamba_ssm.modules.mamba2": {"Mamba2": Mamba2},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.ssd_combined": _COMBINED,
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm, "rmsnorm_fn": rmsnorm_fn},
    "mamba_ssm.ops.triton.selective_state_update": {"selective_state_update": selective_state_update},
}
