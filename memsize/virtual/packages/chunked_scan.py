"""The scan of mamba_ssm's Mamba-2, chunk by chunk.

Source: mamba 2.3, `ops/triton/ssd_combined.py`, `ssd_chunk_state.py`, `ssd_state_passing.py`, `ssd_bmm.py` and
`ssd_chunk_scan.py`. Known limit: the workspaces of deterministic algorithms are not counted.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

_ROWS: Final = 32
"""The least rows of a block: sums over a chunk have as many parts as it has blocks of these."""
_STATES: Final = 64
"""The least elements of a state in a block."""


class Scan(NamedTuple):
    """The arguments of a scan: `x` is ``[batch, length, heads, size]``, `b` and `c` are ``[batch, length, groups,
    state]``.
    """

    chunk: int
    state_dtype: torch.dtype | None
    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    initial_states: Tensor | None

    @property
    def chunks(self) -> int:
        return -(-self.x.shape[1] // self.chunk)

    @property
    def splits(self) -> int:
        """Into how many sums the heads of a group are split, so that all multiprocessors work."""
        batch, _, heads, _ = self.x.shape
        ratio = heads // self.b.shape[2]
        processors = torch.cuda.get_device_properties(self.x.device).multi_processor_count
        return -(-ratio // max(min(math.ceil(batch * self.chunks * heads / processors), ratio), 1))

    def by_token(self, *extra: int) -> Tensor:
        """A float32 number for each token and head, chunk by chunk."""
        batch, _, heads, _ = self.x.shape
        return self.x.new_empty((batch, heads, self.chunks, *extra, self.chunk), dtype=torch.float32)

    def states(self, dtype: torch.dtype) -> Tensor:
        """The state after each chunk."""
        batch, _, heads, size = self.x.shape
        return self.x.new_empty((batch, self.chunks, heads, size, self.b.shape[3]), dtype=dtype)

    def products(self, *splits: int) -> Tensor:
        """The products of all pairs of a chunk's tokens, in float32."""
        shape = (len(self.x), self.chunks, *splits, self.b.shape[2], self.chunk, self.chunk)
        return self.x.new_empty(shape, dtype=torch.float32)

    def sums_of_d(self) -> Tensor:
        """The parts of the gradient of D, block by block."""
        assert self.d is not None
        batch, _, heads, size = self.x.shape
        blocks = -(-self.chunk // _ROWS)
        return self.x.new_zeros(
            (blocks, batch, self.chunks, heads, size if self.d.dim() == 2 else 1), dtype=torch.float32
        )


def scan_forward(scan: Scan) -> tuple[Tensor, Tensor | None, Tensor, Tensor, tuple[Tensor, ...]]:
    """The output, that before the gate, the cumulated decay of each token, the last states, and what else is alive
    while the caller runs.
    """
    x, b, c, z = scan.x, scan.b, scan.c, scan.z
    b, c = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (b, c))
    steps, decay = scan.by_token(), scan.by_token()
    states = scan.states(torch.float32)
    states, last = scan.states(scan.state_dtype or c.dtype), torch.empty_like(states[:, 0])
    _pairs = scan.products()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out, None if z is None else torch.empty_like(out), decay, last, (steps, states)


class Gradients(NamedTuple):
    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    initial_states: Tensor | None
    gated: Tensor | None
    """The output times the gate once more, where it is computed again."""


def scan_backward(
    scan: Scan,
    gradient: Tensor,
    *,
    of_x: Tensor | None = None,
    of_dt: Tensor | None = None,
    of_b: Tensor | None = None,
    of_c: Tensor | None = None,
    of_z: Tensor | None = None,
    recomputes: bool = False,
) -> Gradients:
    """The gradients of a scan; the states are computed again. Gradients that are there are written to."""
    x, a, d, z, groups = scan.x, scan.a, scan.d, scan.z, scan.b.shape[2]
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    of_b = torch.empty_like(scan.b) if of_b is None else of_b
    of_c = torch.empty_like(scan.c) if of_c is None else of_c
    of_dt = torch.empty_like(scan.dt) if of_dt is None else of_dt
    _dt = scan.dt.clone()
    _steps, _decay, _pairs = scan.by_token(), scan.by_token(), scan.products()
    states = scan.states(torch.float32)
    states, _last = torch.empty_like(states), torch.empty_like(states[:, 0])
    gated, of_d = None, None
    if z is not None:
        parts = scan.sums_of_d() if d is not None else None
        of_z = torch.empty_like(z) if of_z is None else of_z
        gated = torch.empty_like(x) if recomputes else None
        gradient = torch.empty_like(gradient)
        of_d = None if parts is None or d is None else parts.sum((0, 1, 2)).view_as(d).to(d.dtype)
        del parts
    of_states = torch.empty_like(states)
    dtype = scan.state_dtype or x.dtype
    converted = torch.empty_like(of_states, dtype=dtype), None if dtype == states.dtype else states.to(dtype)
    of_first = None if scan.initial_states is None else torch.empty_like(converted[0][:, 0])
    blocks = -(-x.shape[3] * scan.b.shape[3] // _STATES)
    of_decay = x.new_empty((len(x), x.shape[2], scan.chunks, blocks), dtype=torch.float32).sum(-1)
    of_states, states = converted[0], states if converted[1] is None else converted[1]
    del converted
    parts = scan.sums_of_d() if d is not None else None
    of_x = torch.empty_like(x) if of_x is None else of_x
    _of_steps = scan.by_token()
    if d is not None and parts is not None:
        sums = parts.sum((0, 1, 2))
        of_own_d = (sums.sum(-1) if d.dim() == 1 else sums).to(d.dtype)
        of_d = of_own_d if of_d is None else of_d
        del parts, sums
    of_next = scan.by_token()
    splits = (scan.splits, groups, scan.b.shape[3])
    of_b_sums = x.new_empty((*x.shape[:2], *splits), dtype=torch.float32).sum(2)
    of_before = scan.by_token()
    of_c_sums = x.new_empty((*x.shape[:2], *splits), dtype=torch.float32).sum(2)
    of_pairs = scan.products(scan.splits).sum(2)
    of_before[..., -1] += of_decay
    before = of_before.flip([-1]).cumsum(dim=-1).flip([-1])
    of_a = scan.by_token(-(-scan.chunk // _ROWS)).sum(dim=3)
    of_a += of_next + before
    of_bias = None if scan.dt_bias is None else torch.empty_like(scan.dt_bias, dtype=torch.float32)
    del of_b_sums, of_c_sums, of_pairs, of_states, states
    return Gradients(
        of_x, of_dt, torch.empty_like(a, dtype=torch.float32), of_b, of_c, of_d, of_z, of_bias, of_first, gated
    )


class _Chunked(torch.autograd.Function):
    """The scan by itself. Its inputs and its output are kept."""

    @staticmethod
    def forward(ctx: Any, chunk: int, state_dtype: torch.dtype | None, *tensors: Any) -> tuple[Tensor, Tensor]:
        scan = Scan(chunk, state_dtype, *tensors)
        out, ungated, decay, last, _alive = scan_forward(scan)
        ctx.options = chunk, state_dtype
        ctx.save_for_backward(out if ungated is None else ungated, decay, *tensors)
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        _out, _decay, *tensors = ctx.saved_tensors
        chunk, state_dtype = ctx.options
        gradients = scan_backward(Scan(chunk, state_dtype, *tensors), gradient)
        return None, None, *gradients[:9]


_CHUNKED: Final = ("D", "z", "dt_bias", "initial_states")


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    *others: Any,
    **named: Any,
) -> Any:
    """The scan of Mamba-2, and its last states if asked for."""
    options = named | dict(zip(_CHUNKED, others, strict=False))
    tensors = (options.get(name) for name in _CHUNKED)
    out, last = _Chunked.apply(  # type: ignore[no-untyped-call]
        chunk_size, options.get("state_dtype"), x, dt, A, B, C, *tensors
    )
    return (out, last) if options.get("return_final_states") else out
