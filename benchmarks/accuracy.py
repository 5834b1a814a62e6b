"""Predicted beside measured: reads a table of measured runs and prints the error of each predictor.

    python -m benchmarks.accuracy RUNS.csv

The table has the columns of the xMem paper's results: model, optimizer, batch, input, gpu, the NVML delta of the whole
process, and what other predictors said. Models are built from torchvision's and transformers' code; a row whose library
is missing is left out. What is predicted is the installed code: a release of transformers that computes attention
otherwise than the measured one takes another amount of memory.
"""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import memsize
from benchmarks.zoo.operators import declare
from memsize.analysis.step import StepTrace
from memsize.loading.weightless import Weightless

MIB = 2**20
STACK = "torch=2.6,cuda=12.4"
"""What the paper ran: its CUDA is the one that PyTorch 2.6 comes with by default."""
VISION = {
    "ConvNeXtBase": "convnext_base",
    "VGG16": "vgg16",
    "VGG19": "vgg19",
    "MnasNet": "mnasnet1_0",
    "MobileNetV2": "mobilenet_v2",
    "RegNetY400MF": "regnet_y_400mf",
}
_TEXT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "EleutherAI/gpt-neo-125M": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {"hidden_size": 768, "num_layers": 12, "attention_types": [[["global", "local"], 6]], "num_heads": 12},
    ),
    "T5-small": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_ff": 2048, "num_layers": 6, "num_heads": 8, "decoder_start_token_id": 0},
    ),
    "distilbert/distilgpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 6}),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
        },
    ),
    "google/gemma-2-2b-it": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 256000,
        },
    ),
}


def built(name: str) -> Callable[[], nn.Module]:
    """A function that builds the model of a row; raises ImportError or KeyError where that can't be done."""
    if name in VISION:
        import torchvision

        return lambda: torchvision.models.get_model(VISION[name], weights=None)
    import transformers

    model, config, values = _TEXT[name]
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**values))


def inputs(name: str, batch: int) -> Any:
    """What the row's training was fed: 86×86 pictures, or 128 tokens that are their own labels."""
    if name in VISION:
        return torch.empty(batch, 3, 86, 86, device="meta")
    tokens = torch.zeros(batch, 128, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def predicted(row: dict[str, str]) -> StepTrace:
    """The row's training, on its GPU and with the PyTorch of the paper."""
    name = row["model"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Weightless():
            model = built(name)()
        optimizer = {"SGD": "sgd"}.get(row["optimizer"], row["optimizer"].lower())
        arguments = inputs(name, int(row["batch"]))
        gpu = {"RTX": "rtx3060", "A100-SXM4-40GB": "a100"}[row["gpu"].split()[0]]
        return memsize.trace(model, arguments, optimizer=optimizer, gpu=gpu, stack=STACK, steps=2)


def compared(row: dict[str, str]) -> list[Any]:
    """One line: what was measured, what we say, and the relative errors of all predictors."""
    name, batch, measured = row["model"], int(row["batch"]), int(row["ground_nvml_delta_bytes"])
    step = predicted(row)
    others = [row["xmem_pred_bytes"], row["dnnmem_pred_bytes"]]
    errors = [(int(said) - measured) / measured if said else None for said in others]
    peak = step.peak
    shown = [None if error is None else f"{error:+.1%}" for error in ((peak.reserved - measured) / measured, *errors)]
    device = f"{peak.device.low / MIB:,.0f} to {peak.device.high / MIB:,.0f}"
    full = "out of memory" if row["real_oom"] == "true" else ""
    return [
        name.rpartition("/")[2],
        row["optimizer"],
        batch,
        f"{measured / MIB:,.0f}",
        f"{peak.reserved / MIB:,.0f}",
        device,
        *shown,
        full,
    ]


def lines(path: Path) -> Iterator[list[Any]]:
    """The comparison of every row whose model can be built."""
    with path.open() as file:
        for row in csv.DictReader(file):
            try:
                yield compared(row)
            except (ImportError, KeyError, memsize.MemsizeError, NotImplementedError) as error:
                print(f"left out: {row['model']}: {str(error).splitlines()[0]}", file=sys.stderr)


def versions() -> Iterator[str]:
    """The releases that the models are built from, as far as they are installed."""
    for name in ("torch", "torchvision", "transformers"):
        with suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"


def main(path: str) -> None:
    declare()
    headers = ["model", "optimizer", "batch", "measured", "reserved", "device", "memsize", "xMem", "DNNMem", ""]
    print(tabulate(lines(Path(path)), headers, tablefmt="github", disable_numparse=True))
    print(f"\n{', '.join(versions())}")


if __name__ == "__main__":
    main(sys.argv[1])
