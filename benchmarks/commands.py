"""Commands that train a model, from the shell: how long one waits on two cores, and what each dispatched op costs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import memsize
from benchmarks.measure import Line, compared, processes_in_turn
from memsize.tracing.ledger import Ledger

LLAMA_8B = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
LLAMA_8B |= {"num_key_value_heads": 8, "vocab_size": 128_256}
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 100}

COMMANDS = (
    ("timm", "report timm:resnet50 --train adamw", 7.0),
    ("transformers", "report hf:config.json --train adamw", 14.0),
    ("transformers", "fit hf:config.json --train adamw", 20.0),
)
"""The library that each needs, the command, and how many seconds it may take on two cores."""
PER_OP = 60e-6
"""Seconds that an op of the fit may take in one process, everything beside the imports counted."""


def lines(quick: bool) -> Iterator[Line]:
    """Whole processes; hf:config.json is a Llama of 8 billion parameters."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(config | (SMALL if quick else LLAMA_8B)))
        for library, command, limit in COMMANDS[1:] if quick else COMMANDS:
            if find_spec(library) is None:
                yield Line(f"memsize {command}", f"{library} is not installed", "", "")
                continue
            (spent,) = processes_in_turn([("-m", "memsize", *command.split())], 1 if quick else 3, folder)
            yield compared(f"memsize {command}, whole process", spent.seconds, "the limit", limit, 1.0)
        if find_spec("transformers") is not None:
            count, seconds = dispatched(f"hf:{folder / 'config.json'}")
            what = f"{count:,} dispatched ops of that fit in one process, each"
            yield Line(what, f"{seconds / count * 1e6:.1f} µs", "the limit", "60.0 µs", seconds / count / PER_OP, 1.0)


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
