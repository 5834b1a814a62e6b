"""The GPT of "Build a Large Language Model From Scratch", trained for an epoch as its chapter on speed does.

Each row has one change more than the one before; those that don't change memory share a row. The first loss is followed
by an evaluation, and the epoch by fifty tokens of text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

import memsize
from benchmarks.published.rows import Row

WIDTH: Final = 768
HEADS: Final = 12
LENGTH: Final = 1024
VOCABULARY: Final = 50257
LAYERS: Final = 12
BATCH: Final = 8
PROMPT: Final = 4
"""Tokens of "Every effort moves you"."""

_CHANGES: Final = ("mask made in the forward", "fused AdamW", "bfloat16", "PyTorch's norm and GELU", "flash attention")


def predict(row: Row) -> int:
    """What the allocator holds after the first epoch, in bytes."""
    changes = int(row.values["changes"])
    with memsize.virtual_gpu(row.source.gpu, stack=row.source.stack):
        allocated, reserved = _epoch(_built(changes), fused=changes >= 2)
        return reserved if row.figure == "reserved" else allocated


def _built(changes: int) -> nn.Module:
    attention: Callable[[], nn.Module] = FlashAttention if changes >= 5 else lambda: Attention(stored_mask=changes < 1)
    model = Gpt(attention, own=changes < 4).to("cuda")
    return model.to(torch.bfloat16) if changes >= 3 else model


def _epoch(model: nn.Module, *, fused: bool) -> tuple[int, int]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=fused)
    for step in range(3):
        optimizer.zero_grad()
        loss = _loss(model)
        loss.backward()
        optimizer.step()
        if step == 0:
            _evaluate(model)
    _generate(model)
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _loss(model: nn.Module) -> Tensor:
    tokens, targets = (torch.zeros(BATCH, LENGTH, dtype=torch.int64).to("cuda") for _ in range(2))
    logits = model(tokens)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _evaluate(model: nn.Module) -> None:
    """The loss of one batch for training and of one for validation."""
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            _loss(model).item()
    model.train()


def _generate(model: nn.Module) -> None:
    model.eval()
    tokens = torch.zeros(1, PROMPT, dtype=torch.int64).to("cuda")
    for _ in range(50):
        with torch.no_grad():
            logits = model(tokens)
        tokens = torch.cat((tokens, torch.argmax(logits[:, -1, :], dim=-1, keepdim=True)), dim=1)
    model.train()


class Attention(nn.Module):
    """Attention that makes its scores, with a causal mask that is stored or made each time."""

    def __init__(self, *, stored_mask: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("mask", torch.triu(torch.ones(LENGTH, LENGTH), diagonal=1) if stored_mask else None)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        keys, queries, values = self.key(x), self.query(x), self.value(x)
        keys, values, queries = (
            part.view(batch, length, HEADS, -1).transpose(1, 2) for part in (keys, values, queries)
        )
        scores = queries @ keys.transpose(2, 3)
        if self.mask is not None:
            hidden = self.mask.bool()[:length, :length]
        else:
            hidden = torch.triu(torch.ones(length, length, device=x.device, dtype=torch.bool), diagonal=1)
        scores.masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        context = (weights @ values).transpose(1, 2)
        context = context.reshape(batch, length, WIDTH)
        return self.out(context)  # type: ignore[no-any-return]


class FlashAttention(nn.Module):
    """Attention by PyTorch's function, with one product for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.inputs(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts
        dropout = 0.1 if self.training else 0.0
        context = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        context = context.transpose(1, 2).contiguous().view(batch, length, WIDTH)
        return self.out(context)  # type: ignore[no-any-return]


class Norm(nn.Module):
    """Layer normalization, operation by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normal = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normal + self.shift


class Gelu(nn.Module):
    """GELU, operation by operation."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))))


class Block(nn.Module):
    """A layer with the norm before attention and before the feed-forward part."""

    def __init__(self, attention: nn.Module, *, own: bool) -> None:
        super().__init__()
        activation = Gelu() if own else nn.GELU(approximate="tanh")
        self.attention = attention
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), activation, nn.Linear(4 * WIDTH, WIDTH))
        self.first, self.second = (Norm() if own else nn.LayerNorm(WIDTH) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.first(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.second(x)
        x = self.feed_forward(x)
        x = self.dropout(x)
        return x + shortcut


class Gpt(nn.Module):
    """124 million parameters in the layers, and a head of its own."""

    def __init__(self, attention: Callable[[], nn.Module], *, own: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block(attention(), own=own) for _ in range(LAYERS)))
        self.norm = Norm() if own else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.tokens(ids)
        places = self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = embedded + places
        x = self.dropout(x)
        x = self.blocks(x)
        x = self.norm(x)
        return self.head(x)  # type: ignore[no-any-return]
