"""Commands on deep models, from the shell: the CPU seconds that each takes beyond its imports, a deep model beside a
shallow one, and what each dispatched op costs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from torch import nn

import memsize
from benchmarks.llama import DECLARE
from benchmarks.measure import Line, compared, in_turn, processes_in_turn
from memsize.tracing.ledger import Ledger

LLAMA_8B = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
LLAMA_8B |= {"num_key_value_heads": 8, "vocab_size": 128_256}
LLAMA_405B = LLAMA_8B | {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248}
LLAMA_405B |= {"num_attention_heads": 128}
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 100}

SWEEP = """
target = "hf:8b/config.json"
train = "adamw"
scenario = "bf16"
batch_size = [1, 2, 3, 4, 5]
seq_len = [512, 1024, 2048, 4096]
gpu = "h100"
"""
COMMANDS = (
    ("report hf:8b/config.json --train adamw", 4.0),
    ("fit hf:8b/config.json --train adamw", 5.0),
    ("fit hf:8b/config.json --train adamw --batch-size 1", 15.0),
    ("fit hf:llama --seq-len 2048 --train adamw --gpu h100 --gpus 1..8 --parallel fsdp --scenario amp-bf16", 15.0),
    ("timeline hf:405b/config.json --train adamw --parallel fsdp=1024", 10.0),
    ("fit hf:8b/config.json --vary context,batch", 30.0),
    ("sweep sweep.toml --fresh", 10.0),
)
"""The command, and the CPU seconds that it may take beyond its imports."""
IMPORTS = f"{DECLARE}; import memsize; from transformers import LlamaForCausalLM"
DEEPER = 10.0
"""How many times as long as ten equal layers a thousand may take."""
PER_OP = 60e-6
"""Seconds that an op of the fit may take in one process, everything beside the imports counted."""


def lines(quick: bool) -> Iterator[Line]:
    """The configs are those of Llamas with 8 and 405 billion parameters."""
    yield _deeper(20 if quick else 1000)
    if find_spec("transformers") is None:
        yield Line("commands on deep models", "transformers is not installed", "", "")
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        for path, sizes in (("8b", LLAMA_8B), ("405b", LLAMA_405B)):
            (folder / path).mkdir()
            config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
            (folder / path / "config.json").write_text(json.dumps(config | (SMALL if quick else sizes)))
        (folder / "sweep.toml").write_text(SWEEP)
        for command, limit in COMMANDS[:2] if quick else COMMANDS:
            processes = [("-m", "memsize", *command.split()), ("-c", IMPORTS)]
            spent, imports = processes_in_turn(processes, 1 if quick else 3, folder)
            beyond = max(spent.cpu - imports.cpu, 0.0)
            yield compared(f"memsize {command}, CPU beyond imports", beyond, "the limit", limit, 1.0)
        count, taken = dispatched(f"hf:{folder / '8b' / 'config.json'}")
    what = f"{count:,} dispatched ops of that fit in one process, each"
    yield Line(what, f"{taken / count * 1e6:.1f} µs", "the limit", "60.0 µs", taken / count / PER_OP, 1.0)


def _deeper(layers: int) -> Line:
    """The CPU time of the default report on so many equal layers that are trained, beside that on ten."""
    nets = [
        nn.Sequential(*(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(count)))
        for count in (10, layers)
    ]
    calls = [lambda net=net: memsize.report(net, (64, 256), train="adamw") for net in nets]  # type: ignore[misc]
    calls[0]()
    few, many = in_turn(calls, 1, time.process_time)
    return compared(f"report on {layers:,} encoder layers, CPU", many, "10 of them", few, DEEPER)


def dispatched(target: str) -> tuple[int, float]:
    """How many ops a fit dispatches, and the CPU seconds that all of it takes, its imports apart."""
    import transformers

    assert transformers.LlamaForCausalLM
    count, original = 0, Ledger.__torch_dispatch__

    def counted(ledger: Ledger, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        return original(ledger, *arguments)

    start = time.process_time()
    memsize.fit(target, train="adamw")
    taken = time.process_time() - start
    with mock.patch.object(Ledger, "__torch_dispatch__", counted):
        memsize.fit(target, train="adamw")
    return count, taken
