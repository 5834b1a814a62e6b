"""Language models: GPT-2, BERT, T5, Llama, and a small mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def _heads(x: Tensor, count: int) -> Tensor:
    """(batch, length, width) → (batch, heads, length, width of one)."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class GPT2Block(nn.Module):
    """Causal attention and a perceptron, each after its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act, self.drop1, self.drop2 = nn.GELU(approximate="tanh"), nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part, self.heads) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        rate = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + self.drop1(self.out(_joined(y)))
        return x + self.drop2(self.down(self.act(self.up(self.norm2(x)))))


class GPT2(nn.Module):
    """Radford et al., 2019: 124,439,808 parameters, or 774,030,080 for the large one; the head is the embedding.

    `checkpointed` recomputes each block in backward.
    """

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12, checkpointed: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50257, width), nn.Embedding(1024, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(GPT2Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50257, bias=False)
        self.head.weight = self.tokens.weight
        self.checkpointed = checkpointed

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.drop(self.tokens(input_ids) + self.places(places))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


class BertLayer(nn.Module):
    """Attention and a perceptron, each before its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm2, self.drop = nn.LayerNorm(width, eps=1e-12), nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (_heads(part(x), self.heads) for part in (self.query, self.key, self.value))
        rate = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate)
        x = self.norm1(x + self.drop(self.out(_joined(y))))
        return self.norm2(x + self.drop(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    """Devlin et al., 2018, base, with a classifier of two classes: 109,482,240 + 1,538 parameters."""

    def __init__(self) -> None:
        super().__init__()
        width = 768
        self.tokens, self.places, self.types = (nn.Embedding(count, width) for count in (30522, 512, 2))
        self.norm, self.drop = nn.LayerNorm(width, eps=1e-12), nn.Dropout(0.1)
        self.layers = nn.ModuleList(BertLayer(width, 12) for _ in range(12))
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.types(torch.zeros_like(input_ids)) + self.places(places)
        x = self.drop(self.norm(x))
        mask = attention_mask[:, None, None, :].expand(-1, 1, input_ids.shape[1], -1) > 0
        for layer in self.layers:
            x = layer(x, mask)
        return self.classifier(self.drop(torch.tanh(self.pooler(x[:, 0]))))


class RootNorm(nn.Module):
    """Scaled by the root of the mean square, which is computed in float32; as T5 and Llama have it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class T5Attention(nn.Module):
    """Scores that are not scaled, with a bias by distance."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (_heads(part, self.heads) for part in (self.query(x), self.key(memory), self.value(memory)))
        scores = q @ k.transpose(-1, -2) + bias
        weights = F.softmax(scores.float(), -1).type_as(scores)
        return self.out(_joined(self.drop(weights) @ v))


class T5Layer(nn.Module):
    """Attention, in a decoder attention to the encoder too, and a perceptron, each after its norm."""

    def __init__(self, width: int, heads: int, decoder: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RootNorm(width, 1e-6) for _ in range(3 if decoder else 2))
        self.attention = T5Attention(width, heads)
        self.crossed = T5Attention(width, heads) if decoder else None
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.drop(self.attention(y, y, bias))
        if self.crossed is not None and memory is not None:
            y = self.norms[1](x)
            nothing = torch.zeros((1, 1, 1, 1), dtype=y.dtype, device=y.device)
            x = x + self.drop(self.crossed(y, memory, nothing))
        return x + self.drop(self.down(self.drop(F.relu(self.up(self.norms[-1](x))))))


class T5Stack(nn.Module):
    """Layers that share one table of biases by distance."""

    def __init__(self, width: int, heads: int, layers: int, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.biases = nn.Embedding(32, heads)
        self.layers = nn.ModuleList(T5Layer(width, heads, decoder) for _ in range(layers))
        self.norm, self.drop = RootNorm(width, 1e-6), nn.Dropout(0.1)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x, bias = self.drop(x), self._bias(x.shape[1], x.device)
        for layer in self.layers:
            x = layer(x, bias, memory)
        return self.drop(self.norm(x))

    def _bias(self, length: int, device: torch.device) -> Tensor:
        places = torch.arange(length, device=device)
        apart = places[None, :] - places[:, None]
        bias: Tensor = self.biases(self._bucket(apart)).permute(2, 0, 1).unsqueeze(0)
        if self.decoder:
            hidden = torch.full((length, length), torch.finfo(bias.dtype).min, dtype=bias.dtype, device=device)
            bias = bias + hidden.triu(1)
        return bias

    def _bucket(self, apart: Tensor) -> Tensor:
        """Near distances have a bucket each, far ones share them, up to 128."""
        if self.decoder:
            buckets, offset, apart = 32, torch.zeros_like(apart), -torch.clamp(apart, max=0)
        else:
            buckets, offset, apart = 16, (apart > 0).long() * 16, apart.abs()
        near = buckets // 2
        far = near + (torch.log(apart.float() / near) / math.log(128 / near) * (buckets - near)).long()
        far = torch.clamp(far, max=buckets - 1)
        return offset + torch.where(apart < near, apart, far)


class T5Small(nn.Module):
    """Raffel et al., 2019: 60,506,624 parameters; the embedding serves both stacks and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32128, 512)
        self.encoder, self.decoder = T5Stack(512, 8, 6, False), T5Stack(512, 8, 6, True)
        self.head = nn.Linear(512, 32128, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        memory = self.encoder(self.tokens(input_ids))
        return self.head(self.decoder(self.tokens(decoder_input_ids), memory) * 512**-0.5)


class Rotary(nn.Module):
    """Cosines and sines by position; Su et al., 2021."""

    def __init__(self, size: int, base: float = 10_000.0) -> None:
        super().__init__()
        frequencies = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angles = torch.outer(places, self.frequencies.float())
        both = torch.cat([angles, angles], -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class LlamaAttention(nn.Module):
    """Causal attention in which several queries share a key and a value."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        size = width // heads
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * size, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = _rotated(_heads(self.query(x), self.heads), cos, sin)
        k = _rotated(_heads(self.key(x), self.groups), cos, sin)
        v = _heads(self.value(x), self.groups)
        k, v = (part.repeat_interleave(self.heads // self.groups, 1) for part in (k, v))
        return self.out(_joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Gated(nn.Module):
    """A perceptron whose inside is gated; Shazeer, 2020."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inside, bias=False), nn.Linear(width, inside, bias=False)
        self.down = nn.Linear(inside, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Each token goes to two of several gated perceptrons, as Mixtral does it."""

    def __init__(self, width: int, inside: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(Gated(width, inside) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = F.softmax(self.router(flat), -1, dtype=torch.float32).topk(2)
        weights = (weights / weights.sum(-1, keepdim=True)).to(flat.dtype)
        result = torch.zeros_like(flat)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for expert, layer in enumerate(self.experts):
            slot, token = torch.where(mask[expert])
            output = layer(flat[token]) * weights[token, slot, None]
            result.index_add_(0, token, output.to(flat.dtype))
        return result.view_as(x)


class LlamaLayer(nn.Module):
    """Attention and a perceptron, each after its norm."""

    def __init__(self, width: int, heads: int, groups: int, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = RootNorm(width, 1e-5), RootNorm(width, 1e-5)
        self.attention, self.mlp = LlamaAttention(width, heads, groups), mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Touvron et al., 2023, with grouped queries. `tied` uses the embedding as the head, `mlp` makes the perceptrons,
    `checkpointed` recomputes each layer in backward."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: int,
        heads: int,
        groups: int,
        mlp: Callable[[], nn.Module],
        tied: bool = False,
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.tokens, self.rotary = nn.Embedding(vocabulary, width), Rotary(width // heads)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, groups, mlp()) for _ in range(layers))
        self.norm, self.head = RootNorm(width, 1e-5), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.checkpointed = checkpointed

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        cos, sin = self.rotary(x)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if self.checkpointed else layer(x, cos, sin)
        return self.head(self.norm(x))


def llama_tied(checkpointed: bool = False) -> Llama:
    """The sizes of Llama 3.2 1B: 1,235,814,400 parameters."""
    return Llama(128256, 2048, 16, 32, 8, lambda: Gated(2048, 8192), True, checkpointed)


def llama_untied() -> Llama:
    """The sizes of TinyLlama 1.1B: 1,100,048,384 parameters."""
    return Llama(32000, 2048, 22, 32, 4, lambda: Gated(2048, 5632))


def mixture() -> Llama:
    """Four layers of eight experts each."""
    return Llama(32000, 512, 4, 8, 8, lambda: Experts(512, 1024, 8))
