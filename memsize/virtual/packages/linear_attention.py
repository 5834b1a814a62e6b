"""flash-linear-attention (`fla`): the gated delta rule, GLA and simple GLA, on ``[batch, length, heads, width]``.

A sequence is computed in chunks of 64 tokens, each of which begins with a state of ``[key width, value width]`` for
every head. The states are not kept for the backward, which computes them again.

Source: flash-linear-attention 0.6, `ops/gated_delta_rule/chunk.py`, `ops/gla/chunk.py`, `ops/simple_gla/chunk.py` and
what they call in `ops/common/`. Known limits: of packed sequences (`cu_seqlens`), each is assumed to end within a
chunk, the most; context parallelism, and gates and sigmoids inside of the kernel, are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

_CHUNK: Final = 64


class _Options(NamedTuple):
    """Arguments of a call besides tensors that have gradients."""

    scale: float | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    cu_seqlens: Tensor | None = None
    state_v_first: bool = False

    def states(self, k: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The state at the beginning of each chunk, of every head of `v`."""
        begins = 1 if self.cu_seqlens is None else len(self.cu_seqlens) - 1
        chunks = -(-k.shape[1] // _CHUNK) + begins - 1
        return k.new_empty((k.shape[0], chunks, v.shape[2], *self._state(k, v)), dtype=dtype)

    def last(self, k: Tensor, v: Tensor) -> Tensor | None:
        if not self.output_final_state:
            return None
        sequences = len(k) if self.cu_seqlens is None else len(self.cu_seqlens) - 1
        return k.new_empty((sequences, v.shape[2], *self._state(k, v)), dtype=torch.float32)

    def _state(self, k: Tensor, v: Tensor) -> tuple[int, int]:
        return (v.shape[-1], k.shape[-1]) if self.state_v_first else (k.shape[-1], v.shape[-1])


def _in_float32(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, dtype=torch.float32)


def _for_values(k: Tensor, v: Tensor) -> Tensor:
    """As `k`, with the heads of `v`."""
    return k.new_empty((*v.shape[:3], k.shape[-1]))


def _of_keys(gradient: Tensor, k: Tensor) -> Tensor:
    """The gradient of `k`, some heads of which several heads of values share."""
    shared = gradient.shape[2] // k.shape[2]
    return gradient if shared == 1 else gradient.unflatten(2, (-1, shared)).sum(3)


def _of_state(initial: Tensor | None) -> Tensor | None:
    return None if initial is None else _in_float32(initial)


def _contiguous(tensors: tuple[Any, ...]) -> Iterator[Any]:
    return (None if tensor is None else tensor.contiguous() for tensor in tensors)


class _GatedDelta(torch.autograd.Function):
    """The gated delta rule: a chunk's keys and values are replaced by those of its triangular system."""

    @staticmethod
    def forward(ctx: Any, options: _Options, *tensors: Any) -> Any:
        q, k, v, gate, beta, initial = _contiguous(tensors)
        norms: list[Any] = [None, None]
        if options.use_qk_l2norm_in_kernel:
            norms = [tensor.new_empty(tensor.shape[:-1], dtype=torch.float32) for tensor in (q, k)]
            q, k = torch.empty_like(q), torch.empty_like(k)
        gate = _in_float32(gate)
        system = k.new_zeros((*v.shape[:3], _CHUNK))
        keys, values = _for_values(k, v), torch.empty_like(v)
        states, last = options.states(k, v), options.last(k, v)
        new_values = torch.empty_like(values)
        out = torch.empty_like(new_values)
        del keys, values, states
        ctx.save_for_backward(q, k, v, gate, beta, system, initial, *norms)
        ctx.options = options
        return out.to(q.dtype), last

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        q, k, v, gate, beta, _system, initial, *norms = ctx.saved_tensors
        keys, values = _for_values(k, v), torch.empty_like(v)
        states, new_values = ctx.options.states(k, v), torch.empty_like(values)
        of_v = torch.empty_like(gradient.contiguous())
        of_states, of_initial = ctx.options.states(q, v), _of_state(initial)
        of_v = torch.empty_like(of_v)
        of_q, of_k = _for_values(q, v), _for_values(k, v)
        of_gate, of_keys = gate.new_empty((1, *gate.shape)), torch.empty_like(keys)
        of_q, of_k = _of_keys(of_q, q), _of_keys(of_k, k)
        of_gate = of_gate.sum(0)
        more_k, of_values = _for_values(k, v), torch.empty_like(v)
        more_gate, of_beta = torch.empty_like(gate), torch.empty_like(beta)
        more_k = _of_keys(more_k, k)
        of_v = of_values
        of_k.add_(more_k)
        of_gate.add_(more_gate)
        of_gate = torch.empty_like(of_gate)
        del keys, values, states, new_values, of_states, of_keys, more_k, more_gate
        if norms[0] is not None:
            of_q, of_k = torch.empty_like(q), torch.empty_like(k)
        return None, of_q, of_k, of_v, of_gate, of_beta, of_initial


class _SimpleGated(torch.autograd.Function):
    """Linear attention with a gate for each head, or with none."""

    @staticmethod
    def forward(ctx: Any, options: _Options, *tensors: Any) -> Any:
        q, k, v, gate, _, initial = _contiguous(tensors)
        gate = None if gate is None else _in_float32(gate)
        states, last = options.states(k, v), options.last(k, v)
        out = torch.empty_like(v)
        del states
        ctx.save_for_backward(q, k, v, gate, initial)
        ctx.options = options
        return out.to(q.dtype), last

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        q, k, v, gate, initial = ctx.saved_tensors
        states = [ctx.options.states(k, v, torch.float32) for _ in range(2)]
        of_initial = _of_state(initial)
        of_q, of_k = torch.empty_like(q), torch.empty_like(k)
        of_gate = None if gate is None else gate.new_empty((1, *gate.shape)).sum(0)
        of_v = torch.empty_like(gradient)
        del states
        return None, of_q, of_k, of_v, None if of_gate is None else torch.empty_like(of_gate), None, of_initial


class _Gated(torch.autograd.Function):
    """Linear attention with a gate for each element of a key. The products within chunks are kept, in float32."""

    @staticmethod
    def forward(ctx: Any, options: _Options, *tensors: Any) -> Any:
        q, k, v, gate, _, initial = _contiguous(tensors)
        summed = _in_float32(gate)
        states, last = options.states(k, v), options.last(k, v)
        chunk = min(_CHUNK, max(16, 1 << (q.shape[1] - 1).bit_length()))
        within = q.new_empty((*q.shape[:3], chunk), dtype=torch.float32)
        out = torch.zeros_like(v)
        del states
        # A gate of 16 bits is summed again in backward.
        ctx.save_for_backward(q, k, v, summed if gate.dtype == torch.float32 else gate, initial, within)
        ctx.options = options
        return out.to(q.dtype), last

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        q, k, v, gate, initial, within = ctx.saved_tensors
        gate = gate if gate.dtype == torch.float32 else _in_float32(gate)
        states = [ctx.options.states(k, v, torch.float32) for _ in range(2)]
        of_initial, of_v, of_within = _of_state(initial), torch.empty_like(gradient), torch.empty_like(within)
        of_q, of_k, of_gate = _in_float32(q), _in_float32(k), torch.empty_like(gate)
        of_q, of_k = torch.empty_like(of_q), torch.empty_like(of_k)
        del states, of_within
        return None, of_q.to(q), of_k.to(k), of_v, of_gate, None, of_initial


class _Recurrent(torch.autograd.Function):
    """The gated delta rule token by token, for generation: it has no backward."""

    @staticmethod
    def forward(ctx: Any, options: _Options, *tensors: Any) -> Any:
        _, k, v, *_ = _contiguous(tensors)
        out = torch.empty_like(v)
        return out, options.last(k, v)


def _function(rule: Any, positional: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the function of `rule`. It returns the output, like `v`, and the last state if asked for."""

    def function(*args: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        values = dict(zip(positional.split(), args, strict=False)) | named
        others = {name for name, value in values.items() if value is not None and value is not False}
        if others := others - {*_TENSORS, *_Options._fields, "cu_seqlens_cpu"}:
            raise NotImplementedError(
                f"{', '.join(sorted(others))} of {rule.__name__[1:]} in fla is not simulated: install "
                "flash-linear-attention and triton, whose own code runs then"
            )
        options = _Options(**{name: values[name] for name in _Options._fields if values.get(name) is not None})
        result: tuple[Tensor, Tensor | None] = rule.apply(options, *(values.get(name) for name in _TENSORS))
        return result

    return function


_TENSORS: Final = ("q", "k", "v", "g", "beta", "initial_state")
_OPTIONS: Final = "scale initial_state output_final_state"
_DELTA: Final = {
    "chunk_gated_delta_rule": _function(_GatedDelta, f"q k v g beta {_OPTIONS} use_qk_l2norm_in_kernel"),
    "fused_recurrent_gated_delta_rule": _function(_Recurrent, f"q k v g gk gv beta {_OPTIONS}"),
}
_GLA: Final = {"chunk_gla": _function(_Gated, f"q k v g {_OPTIONS} state_v_first")}
_SIMPLE: Final = {"chunk_simple_gla": _function(_SimpleGated, f"q k v g g_gamma {_OPTIONS} state_v_first")}
MODULES: Final[dict[str, dict[str, Any]]] = {
    "fla": {"__version__": "0.6.0"},
    "fla.ops": {**_DELTA, **_GLA, **_SIMPLE},
    "fla.ops.gated_delta_rule": _DELTA,
    "fla.ops.gla": _GLA,
    "fla.ops.simple_gla": _SIMPLE,
}
