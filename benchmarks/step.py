"""Training steps: an 80-layer Llama, its cost per layer, a ResNet-50, and PyTorch's MemTracker on the same model."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import memsize
from benchmarks.measure import ROOT, Line, compared, in_turn, megabytes, processes_in_turn, seconds
from benchmarks.resnet import SIZE, ResNet50
from benchmarks.zoo.operators import declare

LIMIT = 600 * 10**6
LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
LARGE |= {"vocab_size": 128_256}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 100}


def llama(layers: int, sizes: dict[str, int]) -> nn.Module:
    """A Llama of so many layers, without weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))


def traced(model: nn.Module, tokens: int, steps: int = 1) -> Any:
    """bfloat16, AdamW: forward, loss, backward and step, and the peak."""
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    return memsize.trace(model, {"input_ids": ids}, scenario="bf16", optimizer="adamw", steps=steps).peak


def by_memtracker(layers: int, sizes: dict[str, int], tokens: int) -> float:
    """Seconds that MemTracker takes over one step of the same model on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import LlamaConfig, LlamaForCausalLM

    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LlamaConfig(num_hidden_layers=layers, attn_implementation="eager", **sizes)
        config.dtype = torch.bfloat16
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        positions = torch.arange(tokens).unsqueeze(0)
        mask = torch.zeros(1, 1, tokens, tokens, dtype=torch.bfloat16)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        start = time.perf_counter()
        with tracker:
            logits = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
        return time.perf_counter() - start


def lines(quick: bool) -> Iterator[Line]:
    """The Llama has 70.6 billion parameters in 80 layers and sees 2,048 tokens."""
    model = ResNet50()
    (resnet,) = in_turn([lambda: memsize.trace(model, SIZE, optimizer="sgd-momentum", steps=1)], 2 if quick else 9)
    yield Line("ResNet-50, one training step", seconds(resnet), "the limit", "60 ms", resnet / 0.06, 1.0)
    if find_spec("transformers") is None:
        yield Line("Llama 70B, one training step", "transformers is not installed", "", "")
        return
    sizes, layers, tokens = (SMALL, 4, 16) if quick else (LARGE, 80, 2048)
    large = llama(layers, sizes)
    traced(llama(2, sizes), tokens)
    (step,) = in_turn([lambda: traced(large, tokens)], 1 if quick else 3, time.process_time)
    (imported,) = processes_in_turn([("-c", "import torch")], 1 if quick else 3)
    yield compared("Llama 70B, one training step, CPU", step, "import torch", imported.cpu, 0.5)
    memory = _memory(layers, quick)
    yield Line(
        "Llama 70B, peak memory of the trace", megabytes(memory), "the limit", megabytes(LIMIT), memory / LIMIT, 1.0
    )
    few = 2 if quick else 24
    ours, theirs = in_turn([lambda: traced(llama(few, sizes), tokens)], 1)[0], by_memtracker(few, sizes, tokens)
    yield Line(f"{few} of its layers", seconds(ours), "MemTracker", seconds(theirs), ours / theirs, 1 / 40)
    few, many = (2, 8) if quick else (10, 1000)
    narrow = SMALL | {"hidden_size": 256, "num_attention_heads": 4}
    per_layer = [_per_layer(count, narrow) for count in (few, many)]
    what = f"time per layer, {many} layers"
    yield Line(what, seconds(per_layer[1]), f"{few} layers", seconds(per_layer[0]), per_layer[1] / per_layer[0], 1.2)


def _per_layer(layers: int, sizes: dict[str, int]) -> float:
    """Seconds per layer beyond what two layers take."""
    base, model = llama(2, sizes), llama(2 + layers, sizes)
    fixed, whole = in_turn([lambda: traced(base, 64), lambda: traced(model, 64)], 3)
    return (whole - fixed) / layers


def _memory(layers: int, quick: bool) -> int:
    """The peak resident memory of a process that traces one step."""
    (spent,) = processes_in_turn([("-m", "benchmarks.step", str(layers), json.dumps(quick))], 1, ROOT)
    return spent.memory


if __name__ == "__main__":
    declare()
    quick = json.loads(sys.argv[2])
    traced(llama(int(sys.argv[1]), SMALL if quick else LARGE), 16 if quick else 2048)
