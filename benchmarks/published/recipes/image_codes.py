"""Convolutions alone: Qwen-Image's autoencoder in float16, and a layer that is given larger and larger images.

What the autoencoder reserves is left out: its script is not public, and with the usual allocator it would be 15 % less
in decoding and 6 % more in encoding. The layer's script empties the cache after each image, whose tensor stays until
the next one is there.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

import memsize
from benchmarks.published.recipes.run import without_torchao
from benchmarks.published.rows import Row

_CHANNELS = 256
_HEIGHT = 2048


def predict(row: Row) -> int:
    """Bytes: the most that are allocated to decode or encode an image, or reserved after the layer has run."""
    gpu, stack = row.source.gpu, row.source.stack
    if "width" in row.values:
        return _layer(gpu, stack)[int(row.values["width"])]
    height, width = map(int, row.values["size"].split("x"))
    return _autoencoder(gpu, stack, row.values["does"] == "decode", height, width)


def _autoencoder(gpu: str, stack: str, decodes: bool, height: int, width: int) -> int:
    with without_torchao():
        from diffusers import AutoencoderKLQwenImage

    with memsize.virtual_gpu(gpu, stack=stack), torch.inference_mode():
        autoencoder = AutoencoderKLQwenImage().half().cuda().eval()
        shape = (1, 16, 1, height // 8, width // 8) if decodes else (1, 3, 1, height, width)
        numbers = torch.randn(shape, device="cuda", dtype=torch.float16)
        torch.cuda.reset_peak_memory_stats()
        result = autoencoder.decode(numbers) if decodes else autoencoder.encode(numbers)
        del result
        return torch.cuda.max_memory_allocated()


@cache
def _layer(gpu: str, stack: str) -> dict[int, int]:
    reserved = {}
    with memsize.virtual_gpu(gpu, stack=stack):
        layer = nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1).half().cuda()
        for width in range(1024, 2304, 128):
            image = torch.zeros(1, _CHANNELS, _HEIGHT, width).half().to("cuda")
            layer(image)
            reserved[width] = torch.cuda.memory_reserved()
            torch.cuda.empty_cache()
    return reserved
