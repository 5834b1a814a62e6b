"""Texts that the models of "Build a Large Language Model From Scratch" generate, with the repository's own code.

Models are built on the GPU, where the scripts build them on the CPU and copy them. Without a cache, and in the scripts
of chapter 4, only the last tokens are made: what a token takes depends on how many there are before it. The caches of
chapter 4 are put in as they are then.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor

import memsize
from benchmarks.published.environments import ENVIRONMENTS, ready
from benchmarks.published.rows import Row

NEW_TOKENS: Final = 150
PROMPTS: Final = {"llama3": 11, "qwen3": 15}
"""Tokens of the two questions with what their formats add, as the printed times and speeds have them."""
_IMPORTED: Final = ("tiktoken", "tiktoken.load", "matplotlib", "matplotlib.pyplot", "matplotlib.ticker", "requests")
"""What the modules import and generation does not need."""
LAST: Final = 3


def predict(row: Row) -> int:
    """The highest `allocated` of a generation, in bytes."""
    assert row.source.environment is not None
    folder = ready(ENVIRONMENTS[row.source.environment])
    values = dict(row.values)
    generation = _packaged if "model" in values else _scripted
    for name in _IMPORTED:
        sys.modules.setdefault(name, MagicMock())
    with memsize.virtual_gpu(row.source.gpu, stack=row.source.stack):
        if earlier := values.pop("after", None):
            generation(folder, {**values, "class": earlier})()
            torch._dynamo.reset()
        generate = generation(folder, values)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        generate()
        return torch.cuda.max_memory_allocated()


def _module(folder: Path, name: str) -> ModuleType:
    with patch.object(sys, "path", [str(folder), *sys.path]):
        return importlib.import_module(name)


def _packaged(folder: Path, values: Mapping[str, str]) -> Callable[[], object]:
    """A model of the package."""
    batch, family = int(values.get("batch", "1")), values["model"]
    caching = "kv_cache." if values["cache"] == "yes" else ""
    module = _module(folder / "pkg", f"llms_from_scratch.{caching}{family}")
    config = module.QWEN_CONFIG_06_B if family == "qwen3" else module.LLAMA32_CONFIG_1B
    is_compiled = values.get("compiled") == "yes"
    made = NEW_TOKENS if is_compiled != bool(caching) else LAST
    with torch.device("cuda"):
        model = getattr(module, values["class"])(config)
        prompt = PROMPTS[family] + (0 if is_compiled else NEW_TOKENS - made)
        tokens = torch.zeros(batch, prompt, dtype=torch.int64)
    context: dict[str, Any] = {"max_new_tokens": made, "context_size": config["context_length"]}
    if is_compiled:
        model = torch.compile(model)
    if caching or batch > 1:
        loop = _module(folder / "pkg", f"llms_from_scratch.{caching}generate" if caching else "llms_from_scratch.ch04")
        return lambda: loop.generate_text_simple(model=model, idx=tokens, **context)
    loop = _module(folder / "pkg", "llms_from_scratch.ch05")
    return lambda: loop.generate(model=model, idx=tokens, top_k=1, temperature=0.0, **context)


def _scripted(folder: Path, values: dict[str, str]) -> Callable[[], object]:
    """The last tokens of a script of chapter 4."""
    name = values.pop("script")
    script: Any = _module(folder / "ch04" / values.pop("part"), name)
    built: list[Any] = []

    def keep(model: Any, idx: Tensor, max_new_tokens: int, **_: Any) -> Tensor:
        """Take the model in place of the loop."""
        built.extend((model, idx, max_new_tokens))
        return idx

    options = [word for key, value in values.items() for word in (f"--{key}", value)]
    script.tiktoken.get_encoding.return_value.encode.return_value = [15496, 11, 314, 716]
    with (
        patch.object(sys, "argv", [name, *options]),
        patch.object(script, "generate_text_simple_cached", keep),
        torch.device("cuda"),
    ):
        script.main()
    return partial(_last_tokens, *built)


@torch.no_grad()
def _last_tokens(model: Any, prompt: Tensor, count: int) -> None:
    model.eval()
    logits = model(prompt, use_cache=True)
    shapes = [[cached.shape for cached in block.att.buffers()] for block in model.trf_blocks]
    logits = _next(model, logits)
    before = model.current_pos = prompt.shape[1] + count - LAST
    for block, of_block in zip(model.trf_blocks, shapes, strict=True):
        length = min(getattr(block.att, "sliding_window_size", None) or before, before)
        for (name, cached), shape in zip([*block.att.named_buffers()], of_block, strict=True):
            grown = [length if size != old else size for size, old in zip(cached.shape, shape, strict=True)]
            setattr(block.att, name, cached.new_empty(grown))
        block.att.ptr_current_pos = before
    torch.cuda.reset_peak_memory_stats()
    for _ in range(LAST):
        logits = _next(model, logits)


def _next(model: Any, logits: Tensor) -> Any:
    return model(logits[:, -1].argmax(dim=-1, keepdim=True), use_cache=True)
