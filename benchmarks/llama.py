"""The default report on a Llama of 6.7 billion parameters, from the shell: its time, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure import Line, compared, megabytes, processes_in_turn

LIMIT = 10**9
"""Bytes. The weights alone would take 27 of them."""

FULL = "hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32"
SMALL = "hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4"
DECLARE = "from benchmarks.zoo.operators import declare; declare()"
"""transformers imports torchvision where that is installed, whose wheel may be of another build of torch."""
SOURCE = """
{declare}
from transformers import LlamaConfig, LlamaForCausalLM


def build():
    return LlamaForCausalLM(LlamaConfig({sizes}))
"""


def lines(quick: bool) -> Iterator[Line]:
    """Beside the import of transformers, without which there is no such model."""
    if find_spec("transformers") is None:
        yield Line("Llama 7B, default report", "transformers is not installed", "", "")
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "llama.py").write_text(SOURCE.format(declare=DECLARE, sizes=SMALL if quick else FULL))
        commands = (
            ("-m", "memsize", "report", "llama.py:build", "--input", "input_ids=512:int64"),
            ("-c", f"{DECLARE}; from transformers import LlamaForCausalLM"),
        )
        report, imported = processes_in_turn(commands, 1 if quick else 3, folder)
    yield compared("Llama 7B, default report, whole process", report.seconds, "its import", imported.seconds)
    yield Line(
        "Llama 7B, peak memory of the report",
        megabytes(report.memory),
        "the limit",
        megabytes(LIMIT),
        report.memory / LIMIT,
        1.0,
    )
