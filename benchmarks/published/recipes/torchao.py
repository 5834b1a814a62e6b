"""torchao's trainings: a vision transformer whose optimizer is on the CPU, and a Llama whose weights are int8.

The models, optimizers and losses are those of the scripts, `benchmark_low_bit_adam.py` and
`quantized_training/pretrain_llama2.py`; the loops are theirs without data sets and logs. The optimizer that leaves the
GPU and the Llama come from the repository as it was, torchao's own tensors from the installed release.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memsize
from benchmarks.published.environments import ENVIRONMENTS, ready
from benchmarks.published.rows import Row

STEPS: Final = 2
TOKENS: Final = 590_000_000
"""Of TinyStories with Llama 2's tokenizer: the text has 2.2 GB. Its numbers lie on the GPU, two bytes each."""
_GIANT: Final = "vit_giant_patch14_dinov2.lvd142m"
_MISSED: Final = (
    ("torchao.quantization.utils", "quantize_activation_per_token_absmax"),
    ("torchao.utils", "TORCH_VERSION_AT_LEAST_2_4"),
)
"""What the files import and the installed release no longer has: for caches in int8, and a version."""
_LLAMA: Final = {"n_layer": 24, "n_head": 24, "dim": 1536, "intermediate_size": 6144}


def predict(row: Row) -> int:
    """The highest `allocated` of two steps, in bytes."""
    script = _vision if row.source.name.endswith("vit-giant") else _language
    with memsize.virtual_gpu(row.source.gpu, stack=row.source.stack):
        step = script(row)
        for _ in range(STEPS):
            step()
        return torch.cuda.max_memory_allocated()


def _file(row: Row, path: str) -> ModuleType:
    assert row.source.environment is not None
    return module_of(ready(ENVIRONMENTS[row.source.environment]) / path)


def module_of(path: Path, name: str = "") -> ModuleType:
    """A module of the repository, apart from the package that it belongs to; Dynamo imports it by its `name`."""
    specification = importlib.util.spec_from_file_location(name or path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    for package, name in _MISSED:
        setattr(importlib.import_module(package), name, True)
    specification.loader.exec_module(module)
    return module


def _vision(row: Row) -> Callable[[], None]:
    import timm

    timm.layers.set_reentrant_ckpt(True)  # as before huggingface/pytorch-image-models#2394
    with torch.device("cuda"):
        model = timm.create_model(_GIANT, num_classes=45, img_size=224)
    model.set_grad_checkpointing()
    model.bfloat16().train()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    optimizer_class: Any = partial(torch.optim.AdamW, fused=True)
    if (offload := row.values["offload"]) != "none":
        offloading = _file(row, "torchao/prototype/low_bit_optim/cpu_offload.py").CPUOffloadOptimizer
        gradients = {"offload_gradients": True} if offload == "gradients" else {}
        optimizer_class = partial(offloading, optimizer_class=optimizer_class, **gradients)
    optimizer = optimizer_class(model.parameters(), lr=1e-4, weight_decay=0)
    images = torch.zeros(32, 3, 224, 224, dtype=torch.bfloat16)
    labels = torch.zeros(32, dtype=torch.int64)
    kept: dict[str, Tensor] = {}

    def step() -> None:
        kept["loss"] = functional.cross_entropy(model(images.cuda()), labels.cuda())
        kept["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _language(row: Row) -> Callable[[], None]:
    module = _file(row, "torchao/_models/llama/model.py")
    with torch.device("cuda"):
        model = module.Transformer(module.ModelArgs(block_size=2048, **_LLAMA)).bfloat16()
        model.setup_caches(4, 2048, training=True)
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if row.values["weights"] == "int8":
        from torchao.prototype.quantized_training import int8_weight_only_quantized_training
        from torchao.quantization import quantize_

        quantize_(model, int8_weight_only_quantized_training())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return _trained(model.train())


def _trained(model: nn.Module) -> Callable[[], None]:
    from torchao.optim import _AdamW

    optimizer = _AdamW(model.parameters(), lr=3e-4, weight_decay=1e-2)
    data = torch.empty(TOKENS, dtype=torch.uint16, device="cuda")
    kept: dict[str, Tensor] = {}

    def step() -> None:
        batch = data[: 4 * 2048].view(4, 2048).long()
        logits = model(batch)[:, :-1].float().flatten(0, 1)
        kept["batch"] = batch
        kept["loss"] = functional.cross_entropy(logits, batch[:, 1:].flatten())
        del logits
        kept["loss"].backward()
        with patch.object(torch, "compile", lambda function, **_: function):
            optimizer.step()  # by tensor: the peak is before it
        optimizer.zero_grad()

    return step
