"""memsize without PyTorch: what needs none works, and what runs a model says what to install."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from tests.conftest import Python

SAVED = Path(__file__).with_name("saved")
PROGRAM = """
import sys
for name in "torch torchvision torchao transformers timm".split():
    sys.modules[name] = None  # importing it raises ModuleNotFoundError, as if it were not installed
import memsize.pytest_plugin
from memsize.cli import run
sys.exit(run(sys.argv[1:]))
"""
INSTALL = "pip install torch --index-url https://download.pytorch.org/whl/cpu"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("gpus t4", "Tesla T4"),
        ("scenarios fp16", "model.half()"),
        ("models llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("checkpoint x.safetensors", "16 B"),
        *((f"{command} {SAVED}/{kind}.1.memsize", "") for command, kind in {"report": "report", "fit": "fit",
            "run": "program", "explain": "explanation", "serve": "serving", "generate": "generation"}.items()),
    ],
)  # fmt: skip
def test_what_needs_no_torch(command: str, part: str, python: Python, tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    done = python("-c", PROGRAM, *command.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert part in done.stdout and done.stdout


def test_what_is_known_of_a_preset(python: Python) -> None:
    """8.03e9 parameters of 4, 2 and half a byte; 2 × 32 layers × 8 heads × 128 of 2 bytes for each token."""
    done = python("-c", PROGRAM, "report", "meta-llama/Llama-3.1-8B", "--train", "adamw")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.rstrip().endswith(INSTALL)
    assert done.stdout == (
        "meta-llama/Llama-3.1-8B has 8.03B parameters: 29.9 GiB in float32, 15.0 GiB in float16 or bfloat16, 3.74 GiB "
        "in 4 bits. A token of its KV cache takes 128.00 KiB in 16 bits.\n"
    )


def test_a_wrong_name_gets_the_nearest_presets(python: Python) -> None:
    done = python("-c", PROGRAM, "report", "meta-llama/Llama-3.1-8C")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.rstrip().endswith(INSTALL)
    assert "did you mean meta-llama/Llama-3.1-8B" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    ["report net.py:net", "fit net.py:net -i 2 -b 8 --gpu t4", "run net.py"],
)
def test_what_needs_torch_says_how_to_install_it(command: str, python: Python, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("net = None\n")
    done = python("-c", PROGRAM, *command.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("error: this needs PyTorch") and done.stderr.rstrip().endswith(
        INSTALL
    )
