"""Small networks whose autograd graphs are unusual: dropped before the end, cut, entered from inside, run twice.

What autograd holds on to, and for how long, is all there is to them. They take ``64`` features in a row of any length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 64


class Monitored(nn.Module):
    """Each layer's output is checked for NaN, and its norm is logged: graphs that nobody runs backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
            if x.exp().isnan().any():
                raise ValueError("not a number")
            self.norms = [*self.norms[-3:], x.norm().item()]
        return x


class VectorQuantized(nn.Module):
    """The straight-through quantizer of van den Oord et al., 2017, with its three losses."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.codes = nn.Embedding(128, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.encode(x)
        nearest = torch.cdist(z.flatten(0, 1), self.codes.weight).argmin(-1)
        quantized = self.codes(nearest).view_as(z)
        commitment = functional.mse_loss(quantized.detach(), z) + functional.mse_loss(quantized, z.detach())
        decoded = self.decode(z + (quantized - z).detach())
        return {"loss": functional.mse_loss(decoded, x) + commitment, "decoded": decoded}


class Sampled(nn.Module):
    """The bottleneck of a variational autoencoder, with the sample's likelihood logged."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.deviation, self.decode = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        deviation = functional.softplus(self.deviation(x))
        normal = torch.distributions.Normal(self.mean(x), deviation, validate_args=False)
        sample = normal.rsample()
        normal.log_prob(sample).exp().mean().item()
        return self.decode(sample)


class Spectral(nn.Module):
    """A layer of a Fourier neural operator (Li et al., 2020), and a forecast whose loss lies column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(9, WIDTH, dtype=torch.complex64) / WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.lift(x)
        y = y + torch.fft.irfft(torch.fft.rfft(y, dim=1) * self.weight, n=x.shape[1], dim=1)
        y = self.project(torch.fft.fft2(y).abs())
        return {"loss": functional.mse_loss(y.transpose(1, 2), x.transpose(1, 2).contiguous()), "forecast": y}


class LinearAttention(nn.Module):
    """Attention by random features (Choromanski et al., 2020), whose maximum is subtracted without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("projection", torch.randn(32, WIDTH))

    def _features(self, x: Tensor) -> Tensor:
        x = x @ self.projection.T
        return torch.exp(x - x.amax(-1, keepdim=True).detach()) + 1e-4

    def forward(self, x: Tensor) -> Tensor:
        query, key = self._features(self.query(x)), self._features(self.key(x))
        sums = key.transpose(1, 2) @ self.value(x)
        return query @ sums / (query * key.sum(1, keepdim=True)).sum(-1, keepdim=True)


class _Adjoint(torch.autograd.Function):
    """Euler's steps without a graph; backward retraces them from the result, with a graph for each step."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(4):
                x = x + field(x) / 4
        ctx.field = field
        ctx.save_for_backward(x, *parameters)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, *parameters = ctx.saved_tensors
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for _ in range(4):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                slope = ctx.field(x) / 4
                change, *gradients = torch.autograd.grad(slope, (x, *parameters), gradient, retain_graph=True)
            x, gradient = x - slope, gradient + change
            sums = [total + one for total, one in zip(sums, gradients, strict=True)]
        return None, gradient, *sums


class Continuous(nn.Module):
    """A neural ODE by the adjoint method (Chen et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.field = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Adjoint.apply(self.field, self.embed(x), *self.field.parameters())
        return result


class Penalized(nn.Module):
    """A critic with its gradient penalty (Gulrajani et al., 2017): a backward that is itself run backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        score = self.layers(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        penalty: Tensor = (slope.norm(dim=-1) - 1).square().mean() - score.mean()
        return penalty


class Recomputed(nn.Module):
    """Residual blocks whose insides are run again in backward, in either of PyTorch's ways."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Softmax(-1))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Normalized(nn.Module):
    """Weights that are computed in each forward, one of them from vectors that are updated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.scaled = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.spectral(x).relu())
