"""Command lines: options at random, and models that misbehave."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Final

from benchmarks.fuzz.checkpoints import HOSTILE
from benchmarks.fuzz.trial import Trial

_NET: Final = """from torch import nn


class Net(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.fc = nn.Linear(8, width)

    def forward(self, x):
        return self.fc(x)
"""

_COMMANDS: Final = ("report", "timeline", "layout", "checkpoint", "fit", "verify", "nosuch")
_TARGETS: Final = (
    "net.py:Net", "net.py", "net.py:", "net.py:Nte", ":Net", "nowhere.py:Net", "folder", "folder/x.py:Net", "/dev/null",
    "hf:config.json", "hf:folder", "timm:nosuch", "torchvision:", "x.memsize", "canary", HOSTILE, "", ".", "net.Net",
)  # fmt: skip
_VALUES: Final = (
    "", "0", "1", "-1", "8", "2,8", "x=8", "x=8:int64", "8:float16", "8:nosuch", "nan", "1e9", "99999999", ",", "adamw",
    "sgd:momentum=0.9", "sgd:momentum=", "adamw:nosuch", "t4", "a100,h100", "fp32", "amp-bf16", "all", "fp33", "24GB",
    "5%", "MiB", "json", "html", "width=4", "width=", "width=[1", "a.html", "b.csv", "canary", "folder/a.json",
    "x.memsize", "/dev/null", "/dev/zero", "no/where.html", "~nosuch/a.html", "expandable_segments:True",
    "max_split_size_mb:x", "seq_len", "0:1", HOSTILE, "x" * 300, "größe", "net.py:Net", "net.py:make",
)  # fmt: skip
_OPTIONS: Final = (
    "--input", "--inputs", "--batch-size", "--seq-len", "--arg", "--mode", "--train", "--loss", "--steps", "--gpu",
    "--scenario", "--depth", "--columns", "--format", "--output", "--save", "--units", "--against", "--allocator",
    "--budget", "--margin", "--vary", "--nosuch",
)  # fmt: skip
_SOUND: Final = {
    "--batch-size": ("2", "64"), "--mode": ("eval", "train"), "--train": ("sgd", "adamw:fused"), "--gpu": ("t4",),
    "--scenario": ("fp32", "amp-bf16,fp16", "int8-weight"), "--depth": ("0", "1"), "--columns": ("layer,parameters",),
    "--format": ("json", "csv", "html", "markdown"), "--output": ("a.html", "a.csv"), "--save": ("a.memsize",),
    "--units": ("KiB", "b"), "--budget": ("1GB",), "--margin": ("5%",), "--vary": ("0:1",), "--steps": ("1",),
    "--arg": ("width=2",), "--loss": ("mean",), "--input": ("8", "x=8"),
}  # fmt: skip
"""Values that an option takes."""
_ALONE: Final = ("--jobs", "1")
"""Processes that memsize starts would count among what a file or a model must not do."""
_FLAGS: Final = ("--force", "--debug", "--ema", "--remedies", "--help", "--version", "-")


def option_trials(random: Random) -> Trial:
    """A command with a target and a few options, most of them wrong."""
    arguments = [random.choice(_COMMANDS), random.choice((*_TARGETS[:1] * 40, *_TARGETS))]
    if arguments[0] in ("report", "fit"):
        arguments += _ALONE
    if random.random() < 0.8:
        arguments += ["--input", "8"]
    for _ in range(random.choice((0, 1, 1, 2, 3))):
        option = random.choice(_OPTIONS)
        arguments += [option, random.choice(_SOUND.get(option, _VALUES) if random.random() < 0.7 else _VALUES)]
    if random.random() < 0.3:
        arguments.append(random.choice(_FLAGS))
    # The folder's own files may be overwritten where that is what is asked for.
    outputs = {arguments[i + 1] for i, argument in enumerate(arguments) if argument in ("--output", "--save")}
    writable = {name for name in outputs if "--force" in arguments or name != "canary"}
    return Trial("options", tuple(arguments), _prepare, frozenset(writable), strict=False)


def _prepare(folder: Path) -> None:
    (folder / "net.py").write_text(_NET)
    (folder / "folder").mkdir()
    (folder / "config.json").write_text('{"model_type": "nosuch\\u001b"}')


_MODEL: Final = """import os, sys, warnings
import torch
from torch import nn

BAD = {bad!r}


class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)
        {built}

    def forward(self, x):
        {run}
        return self.fc(x)
"""
_DEEDS: Final = (
    "pass",
    "raise ValueError(BAD)",
    "raise RuntimeError('x' * 1_000_000)",
    "raise KeyError(BAD)",
    "self.add_module(BAD.replace('.', ''), nn.Linear(4, 4))",
    "self.register_buffer(BAD.replace('.', ''), torch.zeros(3))",
    "self.cast = nn.ParameterDict({BAD.replace('.', ''): nn.Parameter(torch.zeros(2))})",
    "setattr(type(self), '__name__', BAD)",
    "warnings.warn('odd')",
    "self.fc = None",
    "del self.fc",
    "self.fc = nn.Linear(8, 10**4)",
    "torch.manual_seed(0)",
    "self.deep = nn.Sequential(*[nn.Identity() for _ in range(300)])",
    "self.same = self.fc",
    "self.empty = nn.Parameter(torch.zeros(0))",
    "nn.Parameter.__repr__(self.fc.weight)",
    "assert False, BAD",
    "print('said')",
    "self.note = BAD",
    "torch.zeros(2, 3) @ torch.zeros(2, 3)",
    "1 / 0",
    "self.nothing",
)


def model_trials(random: Random) -> Trial:
    """A model that fails, prints, or is called as no model should be."""
    name = random.choice(("Net", "Net", "Größe"))
    text = _MODEL.format(bad=HOSTILE, name=name, built=random.choice(_DEEDS), run=random.choice(_DEEDS))
    command = random.choice(
        (
            ["report", *_ALONE],
            ["report", *_ALONE],
            ["timeline", "--train", "sgd"],
            ["layout"],
            ["fit", "--gpu", "t4", *_ALONE],
        )
    )
    format = random.choice(("text", "json", "html", "csv", "markdown"))
    arguments = (*command, f"model.py:{name}", "--input", "8", "-f", format)
    return Trial("models", arguments, lambda folder: _write(folder, text), strict=False)


def _write(folder: Path, text: str) -> None:
    (folder / "model.py").write_text(text, encoding="utf-8")
