"""What fine-tuning needs of the Hub's most used models, as a page with search and sliders: ``make tables``.

`memsize sweep` runs every cell: 25 presets, trained whole, with LoRA and with QLoRA, eager and compiled, at six lengths
on ten cards. That takes days on one machine; ``--backend dask --scheduler tcp://…`` spreads it over a cluster, and
what is done is kept. ``--eager`` leaves out the compiled cells and takes about twenty minutes on two cores; ``--quick``
runs a few cells. The page draws what lies between the batches that were run by itself, and what a saved run of
``memsize fit`` needs, which never leaves the browser.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import memsize
from memsize.records.sweep import SweepRow

FOLDER: Final = Path(__file__).parent
TEMPLATE: Final = FOLDER / "tables.html"
RESULTS: Final = FOLDER.parent / "build" / "tables.jsonl"
PAGE: Final = FOLDER.parent / "docs" / "will_it_fit.html"
MODELS: Final = """
    HuggingFaceTB/SmolLM2-135M Qwen/Qwen2.5-0.5B meta-llama/Llama-3.1-8B
    HuggingFaceTB/SmolLM2-360M HuggingFaceTB/SmolLM2-1.7B TinyLlama/TinyLlama-1.1B-Chat-v1.0 openai-community/gpt2
    openai-community/gpt2-xl meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-3B meta-llama/Llama-3.1-70B
    meta-llama/Llama-2-7b-hf meta-llama/Llama-2-13b-hf mistralai/Mistral-7B-v0.3 Qwen/Qwen2.5-1.5B Qwen/Qwen2.5-7B
    Qwen/Qwen2.5-14B Qwen/Qwen2.5-32B Qwen/Qwen3-0.6B Qwen/Qwen3-4B Qwen/Qwen3-8B google/gemma-2-2b google/gemma-2-9b
    microsoft/phi-4 EleutherAI/pythia-1.4b
""".split()
WAYS: Final = {"full": {}, "LoRA": {"lora": "r=16"}, "QLoRA": {"lora": "r=16", "base": "nf4"}}
LENGTHS: Final = [512, 1024, 2048, 4096, 8192, 16384]
BATCHES: Final = [1, 2, 4]
CARDS: Final = ["t4", "l4", "a10g", "4090", "l40s", "a100", "a100-80gb", "h100", "h200", "b200"]


def grid(quick: bool = False, eager: bool = False) -> dict[str, Any]:
    """The sweep of all cells, of those that are `eager`, or with `quick` of a few that take minutes."""
    models, lengths = (MODELS[:2], LENGTHS[:3:2]) if quick else (MODELS, LENGTHS)
    scenarios = ["bf16"] if quick or eager else ["bf16", "bf16+compile"]
    return {
        "train": "adamw",
        "scenario": scenarios,
        "seq_len": lengths,
        "batch_size": BATCHES,
        "gpu": ["t4", "a100", "h100"] if quick else CARDS,
        "target": [{"target": models, **way} for way in WAYS.values()],
    }


def page_data(rows: Iterable[SweepRow], date: str) -> dict[str, Any]:
    """What the page draws: for each run and card what each batch takes of it, as `nvidia-smi` would show at most."""
    cards: dict[str, int] = {}
    runs: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.device is None or row.gpu_bytes is None:
            continue
        settings = row.settings
        way = "QLoRA" if "base" in settings else "LoRA" if "lora" in settings else "full"
        command = _command(settings)
        run = runs.setdefault(
            command,
            {
                "model": settings["target"],
                "way": way,
                "scenario": settings["scenario"],
                "length": settings["seq_len"],
                "command": command,
                "cards": {},
            },
        )
        cards[str(settings["gpu"])] = row.gpu_bytes
        run["cards"].setdefault(settings["gpu"], []).append([settings["batch_size"], row.device.high])
    for run in runs.values():
        for points in run["cards"].values():
            points.sort()
    return {"date": date, "cards": dict(sorted(cards.items(), key=lambda item: item[1])), "runs": list(runs.values())}


def _command(settings: Any) -> str:
    """The command whose answer is a cell, but for the batch and the card."""
    options = {"--seq-len": "seq_len", "--train": "train", "-s": "scenario", "--lora": "lora", "--base": "base"}
    flags = [text for flag, key in options.items() if key in settings for text in (flag, str(settings[key]))]
    return shlex.join(["memsize", "report", str(settings["target"]), *flags])


def page(data: dict[str, Any]) -> str:
    """The page with its data."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("{{ data }}", text)


def main() -> None:
    """Run the cells that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--backend", default="loky")
    parser.add_argument("--scheduler")
    options = parser.parse_args()
    sweep = memsize.sweep(
        grid(options.quick, options.eager),
        results=RESULTS,
        backend=options.backend,
        scheduler=options.scheduler,
        progress=print,
    )
    PAGE.write_text(page(page_data(sweep.sweep_rows, str(datetime.date.today()))), encoding="utf-8")
    print(f"Wrote {PAGE.relative_to(FOLDER.parent)}")


if __name__ == "__main__":
    main()
