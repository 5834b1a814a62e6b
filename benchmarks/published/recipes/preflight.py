"""Single training steps on a T4, as torch-preflight's `measure_cuda.py` measured them: AdamW under autocast.

The script runs everything in one process, and so does the recipe: cuBLAS's workspaces lie where the first products of
the script put them. It asks `torch.cuda.is_bf16_supported()`, which counts emulation: on a T4 it takes bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import memsize
from benchmarks.published.recipes.long_training import emptied
from benchmarks.published.rows import Row

_TEXTS: Final = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config"),
    "distilbert": ("DistilBertModel", "DistilBertConfig"),
    "bert-base": ("BertModel", "BertConfig"),
}
_SYNTHETIC: Final = (
    (4, 512, 8, 2048, 4, 256, 0.0, False),
    (6, 768, 12, 3072, 8, 512, 0.1, False),
    (6, 768, 12, 3072, 4, 1024, 0.0, True),
    (12, 768, 12, 3072, 2, 512, 0.0, False),
    (4, 1024, 16, 4096, 2, 1024, 0.0, True),
)
"""Layers, width, heads, inner width, batch, length, dropout, and whether attention is fused: measured before models."""

Inputs = Callable[[], tuple[Tensor, ...]]
Loss = Callable[..., Tensor]


def predict(row: Row) -> tuple[int, int, int]:
    """The figure of the second step, and the least and the most of it."""
    setting = row.values["model"], int(row.values["batch"]), int(row.values["size"])
    allocated, reserved = _measured(row.source.gpu, row.source.stack)[setting]
    return (allocated,) * 3 if row.figure == "allocated" else (reserved[0], min(reserved), max(reserved))


@cache
def _measured(gpu: str, stack: str) -> dict[tuple[str, int, int], tuple[int, tuple[int, ...]]]:
    """What every model of the script allocates at most, and what it reserves by each order of addresses."""
    with memsize.virtual_gpu(gpu, stack=stack) as region:
        _context()
        for layers, width, heads, inner, batch, length, dropout, fused in _SYNTHETIC:
            _peak(
                lambda: nn.Sequential(*(Block(width, heads, inner, dropout, fused) for _ in range(layers))),  # noqa: B023
                lambda: (torch.randn(batch, length, width, device="cuda"),),  # noqa: B023
                lambda model, _, x: model(x).float().pow(2).mean(),
            )
        peaks = dict(_models())
    reserved = zip(*emptied(region.trace), strict=True)  # each model empties the cache before and after its steps
    return dict(zip(peaks, zip(peaks.values(), [*reserved][1::2][-len(peaks) :], strict=True), strict=True))


def _context() -> None:
    """A first product and a first convolution."""
    a = torch.randn(256, 256, device="cuda")
    (a @ a).sum().item()
    convolution = nn.Conv2d(3, 16, 3, padding=1).cuda()
    convolution(torch.randn(1, 3, 64, 64, device="cuda")).sum().backward()
    del a, convolution
    torch.cuda.empty_cache()


def _models() -> Iterator[tuple[tuple[str, int, int], int]]:
    for name in _TEXTS:
        for batch, length in ((4, 128), (8, 256)):
            yield (name, batch, length), _text(name, batch, length)
    for batch in (16, 32):
        yield ("resnet50", batch, 224), _vision(batch)


def _text(name: str, batch: int, length: int) -> int:
    import transformers

    cls, config = _TEXTS[name]
    return _peak(
        lambda: getattr(transformers, cls)(getattr(transformers, config)()),
        lambda: (torch.zeros(batch, length, dtype=torch.int64, device="cuda"),),
        _modelled if name == "gpt2" else _encoded,
        rate=1e-5,
    )


def _vision(batch: int) -> int:
    import torchvision

    return _peak(
        lambda: torchvision.models.resnet50(weights=None),
        lambda: (
            torch.randn(batch, 3, 224, 224, device="cuda"),
            torch.zeros(batch, dtype=torch.int64, device="cuda"),
        ),
        lambda model, _, x, target: cross_entropy(model(x), target),
    )


def _modelled(model: nn.Module, outputs: list[object], ids: Tensor) -> Tensor:
    out = model(input_ids=ids, labels=ids)
    outputs.append(out)
    loss: Tensor = out.loss
    return loss


def _encoded(model: nn.Module, outputs: list[object], ids: Tensor) -> Tensor:
    out = model(input_ids=ids)
    outputs.append(out)
    loss: Tensor = out.last_hidden_state.float().pow(2).mean()
    return loss


def _peak(make: Callable[[], nn.Module], inputs: Inputs, loss: Loss, rate: float = 1e-4) -> int:
    """The peak of allocated memory in the second step."""
    torch.cuda.empty_cache()
    model = make().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    tensors = inputs()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        _step(model, optimizer, loss, tensors)
    peak = torch.cuda.max_memory_allocated()
    del model, optimizer, tensors
    torch.cuda.empty_cache()
    return peak


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, tensors: tuple[Tensor, ...]) -> None:
    optimizer.zero_grad(set_to_none=True)
    outputs: list[object] = []  # the script's function holds them until it returns
    with torch.autocast("cuda", dtype=torch.bfloat16):
        value = loss(model, outputs, *tensors)
    value.backward()
    optimizer.step()


class Block(nn.Module):
    """A layer of the script's transformer."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused, bias = heads, fused, dropout > 0
        self.ln1 = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=bias) for _ in range(4))
        self.ln2 = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)
        self.drop = nn.Dropout(dropout) if dropout > 0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Attention and a perceptron, each added to its input."""
        batch, length, width = x.shape
        d = width // self.heads
        y = self.ln1(x)
        q = self.q(y).view(batch, length, self.heads, d).transpose(1, 2)
        k = self.k(y).view(batch, length, self.heads, d).transpose(1, 2)
        v = self.v(y).view(batch, length, self.heads, d).transpose(1, 2)
        if self.fused:
            attended = scaled_dot_product_attention(q, k, v)
        else:
            attended = self.drop(((q @ k.transpose(-2, -1)) / d**0.5).softmax(-1)) @ v
        x = x + self.drop(self.o(attended.transpose(1, 2).reshape(batch, length, width)))
        added: Tensor = x + self.drop(self.fc2(gelu(self.fc1(self.ln2(x)))))
        return added
