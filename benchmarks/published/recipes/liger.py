"""Liger-Kernel's benchmarks of operators: the eager PyTorch that its kernels are compared with, and two of these.

Each benchmark resets the peak, calls the operator and reads `max_memory_allocated`, ten times; the median is the state
after the first call, with gradients there. What its process holds besides counts: Liger's own module beside PyTorch's,
and the workspaces of the benchmark of speed that ran before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

import memsize
from benchmarks.published.recipes import liger_experts, liger_kernels, liger_losses
from benchmarks.published.rows import Row, rows

Call = Callable[[], object]
CALLS: Final = 2
"""The first makes the gradients, the second adds to them, and so do all that follow."""


def predict(row: Row) -> int:
    """The peak of the row's operator, in bytes."""
    return _run(row.source.name, row.values["op"], tuple(_config(row)))[row.setting]


@cache
def _run(source: str, operator: str, swept: tuple[str, ...]) -> Mapping[str, int]:
    """The peaks of one run of a script, by setting.

    What the benchmarks of speed leave in the cache is there for those of memory, which come after: the same calls in
    the same order, beside a buffer of 256 MiB that triton clears. Liger's own kernels, which run before, are left out.
    """
    measured = [row for row in rows([source]) if row.values["op"] == operator and tuple(_config(row)) == swept]
    with memsize.virtual_gpu(measured[0].source.gpu, stack=measured[0].source.stack):
        if operator == "experts":
            return liger_experts.peaks(measured)
        for row in measured:
            call = _operator(row)
            buffer = torch.empty(2**26, dtype=torch.int32, device="cuda")
            call()
            del call, buffer
        return {row.setting: _peak(_operator(row)) for row in measured}


def _mode(row: Row) -> str:
    return row.values.get("mode", "full")


def _config(row: Row) -> Mapping[str, int]:
    return {key: int(value) for key, value in row.values.items() if key not in {"op", "mode"}}


def _operator(row: Row) -> Call:
    """The call that the row's figure is of."""
    return OPERATORS[row.values["op"]](_config(row), _mode(row))


def _peak(measured: Call) -> int:
    for _ in range(CALLS):
        torch.cuda.reset_peak_memory_stats()
        measured()
    return torch.cuda.max_memory_allocated()


def _backwards(loss: Callable[[], Tensor], *, retain: bool = False) -> Call:
    def full() -> None:
        result = loss()
        result.backward(retain_graph=retain)

    return full


# -- layers ------------------------------------------------------------------------------------------------------------


class GatedMlp(nn.Module):
    """Llama's MLP."""

    def __init__(self, width: int, inner: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def _tanh_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _gated(batch: int, width: int, inner: int, activation: Callable[[Tensor], Tensor]) -> Callable[..., Call]:
    def setup(config: Mapping[str, int], mode: str) -> Call:
        x = torch.randn(batch, config["T"], width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with torch.device("cuda"):
            layer = GatedMlp(width, inner, activation)
        layer = layer.to(torch.bfloat16)
        return liger_experts.passes(lambda: layer(x), mode)

    return setup


class RmsNorm(nn.Module):
    """Llama's RMSNorm; with a residual, the sum is returned too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        dtype = x.dtype
        x = x.to(torch.float32)
        if residual is not None:
            x = x + residual.to(torch.float32)
            residual = x
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        result = self.weight * x.to(dtype)
        return result if residual is None else (result, residual.to(dtype))


def _norm(rows: int, key: str, make: Callable[[int], nn.Module], dtype: torch.dtype) -> Callable[..., Call]:
    """A norm beside Liger's, which has the parameters of PyTorch's."""

    def setup(config: Mapping[str, int], mode: str) -> Call:
        width = config[key]
        norms = [make(width).to("cuda") for _ in range(2)]
        x = torch.randn(rows, width, dtype=dtype, device="cuda")
        gradient = torch.randn_like(x)
        x.requires_grad_(True)

        def full(norm: nn.Module = norms[1], beside: nn.Module = norms[0]) -> None:
            output = norm(x)
            output.backward(gradient, retain_graph=True)

        return full

    return setup


def _added_norm(config: Mapping[str, int], mode: str) -> Call:
    """Beside it are Liger's fused norm, and one that has a second weight."""
    norms = [RmsNorm(config["H"]).to("cuda") for _ in range(4)]
    x, residual = (torch.randn(2048, config["H"], device="cuda") for _ in range(2))
    gradients = [torch.randn_like(x), torch.randn_like(residual)]
    x.requires_grad_(True)
    residual.requires_grad_(True)

    def full() -> None:
        output, total = norms[0](x, residual)
        torch.autograd.backward((output, total), gradients)

    return full


def _megatron_norm(config: Mapping[str, int], mode: str) -> Call:
    layer = nn.RMSNorm(config["H"], eps=1e-6).to("cuda").to(torch.bfloat16)
    x = torch.randn(4096, 1, config["H"], device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def full() -> None:
        output = layer(x)
        output.sum().backward()

    return full


def _embedding(batch: int, length: int, width: int) -> Callable[..., Call]:
    def setup(config: Mapping[str, int], mode: str) -> Call:
        tables = [nn.Embedding(config["V"], width, device="cuda") for _ in range(2)]
        ids = torch.randint(0, config["V"], (batch, length), device="cuda")

        def full() -> None:
            output = tables[0](ids)
            output.backward(torch.randn_like(output))

        return full

    return setup


# -- rotary embeddings -------------------------------------------------------------------------------------------------


def _frequencies(head: int, positions: Tensor) -> Tensor:
    """Angles by position: a product of matrices, as Llama's module makes it."""
    steps = torch.arange(0, head, 2, dtype=torch.int64).float().to("cuda") / head
    inverse = (1.0 / 10000.0**steps)[None, :, None].float().expand(1, -1, 1)
    return (inverse @ positions[:, None, :].float()).transpose(1, 2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    straight = x * cos
    first, second = x[..., :half], x[..., half:]
    return straight + (torch.cat((-second, first), dim=-1) * sin)


def _complex_rotated(query: Tensor, key: Tensor, turns: Tensor) -> list[Tensor]:
    pairs = [torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) for x in (query, key)]
    turned = [torch.view_as_real(pair * turns[:, :, None, :]).flatten(3) for pair in pairs]
    return [turned[0].type_as(query), turned[1].type_as(key)]


def _rotary(*, complex_turns: bool) -> Callable[..., Call]:
    """32 heads of queries and 8 of keys; Llama 4's are turned as complex numbers, Llama's lie head by head."""

    def setup(config: Mapping[str, int], mode: str) -> Call:
        length, head = config.get("T", 2048), config.get("H", 8192) // 32
        shape = {"device": "cuda", "requires_grad": True, "dtype": torch.bfloat16}
        query, key = (torch.randn((1, length, heads, head), **shape) for heads in (32, 8))  # type: ignore[call-overload]
        if not complex_turns:
            query, key = query.transpose(1, 2), key.transpose(1, 2)
        gradients = torch.randn_like(query), torch.randn_like(key)
        positions = torch.arange(length, device="cuda", dtype=torch.long).unsqueeze(0)
        with torch.no_grad():
            angles = _frequencies(head, positions)
            if complex_turns:
                turns = torch.polar(torch.ones_like(angles), angles) * 1.0
                both = torch.cat((angles, angles), dim=-1)[:0]
            else:
                both = torch.cat((angles, angles), dim=-1)
                cos, sin = ((part * 1.0).to(torch.bfloat16) for part in (both.cos(), both.sin()))
        del angles, both

        def full(_positions: Tensor = positions) -> None:
            if complex_turns:
                turned = _complex_rotated(query, key, turns)
            else:
                wide = cos.unsqueeze(1), sin.unsqueeze(1)
                turned = [_rotated(x, *wide) for x in (query, key)]
            torch.autograd.grad(turned, (query, key), gradients, allow_unused=True, retain_graph=True)

        return full

    return setup


OPERATORS: Final[Mapping[str, Callable[[Mapping[str, int], str], Call]]] = {
    "geglu": _gated(8, 4096, 11008, _tanh_gelu),
    "tiled-geglu": _gated(2, 2048, 4096, _tanh_gelu),
    "swiglu": _gated(4, 4096, 11008, functional.silu),
    "layer-norm": _norm(4096, "N", lambda width: nn.LayerNorm(width, eps=1e-6), torch.float32),
    "rms-norm": _norm(2048, "H", RmsNorm, torch.bfloat16),
    "added-rms-norm": _added_norm,
    "native-rms-norm": _megatron_norm,
    "embedding-bert": _embedding(32, 512, 768),
    "embedding-llama": _embedding(8, 2048, 4096),
    "rotary": _rotary(complex_turns=False),
    "rotary-complex": _rotary(complex_turns=True),
    "cross-entropy": lambda config, _: _backwards(liger_losses.cross_entropy(config)),
    "liger-cross-entropy": lambda config, _: _backwards(liger_kernels.cross_entropy(config)),
    "liger-swiglu": lambda config, mode: liger_experts.passes(liger_kernels.swiglu(config), mode),
    "jsd": lambda config, _: _backwards(liger_losses.jsd(config), retain=True),
    "jsd-tokens": lambda config, mode: liger_experts.passes(liger_losses.jsd_of_tokens(config), mode),
    "jsd-head": lambda config, _: _backwards(liger_losses.jsd_head(config)),
    "total-variation": lambda config, _: _backwards(liger_losses.total_variation(config), retain=True),
    "orpo": lambda config, _: _backwards(liger_losses.preference(config, liger_losses.odds_ratio)),
    "simpo": lambda config, _: _backwards(liger_losses.preference(config, liger_losses.margin)),
    "grpo-token": lambda config, _: _backwards(liger_losses.group_relative(config, by_sequence=False)),
    "grpo-sequence": lambda config, _: _backwards(liger_losses.group_relative(config, by_sequence=True)),
}
"""What sets up an operator for a configuration and returns the call that is measured."""
