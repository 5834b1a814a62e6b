"""Predicts the rows that its arguments name and prints each as a line of JSON: one process for each environment."""

from __future__ import annotations

import importlib
import json
import sys
import warnings

from benchmarks.published.rows import Row, rows
from benchmarks.zoo.operators import declare
from memsize.device.allocation_events import variants
from memsize.device.replay import replay

RECIPES = {
    "litgpt": "litgpt",
    "vit-l": "vision",
    "preflight": "preflight",
    "liger": "liger",
    "book": "book_gpt",
    "generation": "book_generation",
    "torchao": "torchao",
    "parameter-golf": "parameter_golf",
    "compiled-book": "compiled_scripts",
    "compiled-book/generation": "book_generation",
    "compiled-torchao": "compiled_scripts",
    "torchtune": "compiled_scripts",
    "video": "video_checkpoints",
    "budgets": "memory_budgets",
    "head": "head_losses",
    "qwen-image": "image_codes",
    "layers": "image_codes",
    "pipelines": "quantized_pipelines",
    "peft": "image_adapters",
    "gpumemnet/convolutional": "random_networks",
    "gpumemnet/transformers": "random_transformers",
}
"""The recipe of sources by their name, or by its first part; the rest are the attention tables."""


def predict(row: Row) -> tuple[int, int, int]:
    """The row's figure in bytes: as predicted, and the least and the most that the workspaces of convolutions allow. Of
    the device the middle and the ends of its interval."""
    family = row.source.name.partition("/")[0]
    if family == "server":
        from benchmarks.published.recipes import serving

        size, least, most = (round(figure * row.unit) for figure in serving.predict(row))
        return size, least, most
    name = RECIPES.get(row.source.name) or RECIPES.get(family, "attention_tables")
    recipe = importlib.import_module(f"benchmarks.published.recipes.{name}")
    step = recipe.predict(row)
    if isinstance(step, int):
        return step, step, step
    if isinstance(step, tuple):
        return step
    if row.figure == "device":
        device = step.peak.device
        return (device.low + device.high) // 2, device.low, device.high
    predicted: int = getattr(step.peak, row.figure)
    possible = [replay(events, step.config, streams=step.trace.streams) for events in variants(step.trace)]
    sizes = [predicted, *(getattr(replayed, row.figure).bytes for replayed in possible)]
    return predicted, min(sizes), max(sizes)


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    declare()
    for row in rows(names):
        try:
            said: dict[str, object] = {"predicted": predict(row)}
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        print(json.dumps({"row": row.name, **said}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
