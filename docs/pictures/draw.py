"""Photograph a page of every command for its page in docs/: ``python -m docs.pictures.draw [NAME …]``.

It needs Chromium.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import memsize
from memsize.render import render
from tests.browser import Opened, browser

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
TOY = "notebooks/model.py:Test --input 3,64,64"
COMMANDS = {
    "report": f"report {TOY}",
    "oom": "run --gpu t4 notebooks/train.py --batch-size 512",
    "batch": f"fit {TOY} --train adamw --gpu t4 --scenario fp32,amp-fp16",
    "which_gpu": "fit meta-llama/Llama-3.1-8B --seq-len 2048 --train adamw --scenario bf16 --gpu all --batch-size 1",
    "reserved": f"timeline {TOY} --train adamw --gpu t4",
    "kv_cache": "serve meta-llama/Llama-3.1-8B --gpu h100 --max-model-len 8192 --scenario as-given",
    "savings": f"fit {TOY} --train adamw --gpu t4 --batch-size 512 --scenario fp32",
    "run": "run --gpu t4 notebooks/train.py --batch-size 64",
    "timeline": f"timeline {TOY} --train adamw",
    "fit": f"fit {TOY} --train adamw --gpu t4 --batch-size 512 --scenario fp32",
    "generate": "generate hf:gpt2 --prompt 512 --max-new-tokens 256 --batch-size 1,16 --scenario fp16 --gpu t4",
    "serve": "serve hf:qwen3 --arg dtype=bfloat16 --gpu h100 --max-model-len 8192 --scenario as-given,fp8-weight",
    "layout": "layout benchmarks/resnet.py:ResNet50 --input 3,224,224",
    "diff": "diff timm:resnet18 timm:resnet34",
}
SAVED = {"checkpoint": "checkpoint", "explain": "explanation", "ci": "check"}
"""The saved runs of the tests for commands that need a large file or a snapshot."""
WIDTH, HEIGHT = 920, 620
"""What is photographed of a page: its top, which has the answer."""


def page_of(name: str, folder: Path) -> Path:
    """The page of a command's answer."""
    path = folder / "page.html"
    if name in SAVED:
        path.write_text(render(memsize.load(ROOT / "tests" / "saved" / f"{SAVED[name]}.1.memsize"), "html"), "utf-8")
        return path
    command, *rest = COMMANDS[name].split()
    line = [sys.executable, "-m", "memsize", command, "-o", str(path), "--force", *rest]
    subprocess.run(line, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=name != "oom")
    return path


def main(names: list[str]) -> None:
    """Photograph the pages of the commands of these names, or of all."""
    with TemporaryDirectory() as folder, browser() as chromium:
        for name in names or (*COMMANDS, *SAVED):
            with Opened(chromium, page_of(name, Path(folder))) as page:
                page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
                page.screenshot(path=FOLDER / f"{name}.png", animations="disabled")


if __name__ == "__main__":
    main(sys.argv[1:])
