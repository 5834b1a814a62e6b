"""Public trainings that compile their model: the scripts as they are, but for their text, images and weights.

What a script downloads is made up with the same sizes; modules that it imports and that take no part are empty ones.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any, Final
from unittest.mock import MagicMock, patch

import memsize
from benchmarks.published.environments import ENVIRONMENTS, ready
from benchmarks.published.recipes.torchao import TOKENS, module_of
from benchmarks.published.rows import Row
from benchmarks.scripts import data
from benchmarks.zoo.operators import declare

Change = tuple[str, str]
"""A text of the script, and what stands in its place."""
Setting = Mapping[str, str]


@dataclass(frozen=True)
class Script:
    """A script of a repository: its `path`, what is changed in it, and how it is started for a row's setting."""

    path: Callable[[Setting], str]
    changes: Callable[[Setting], tuple[Change, ...]]
    modules: Callable[[Path], Mapping[str, Any]]
    arguments: Callable[[Setting], tuple[str, ...]]
    options: Mapping[str, Any]


def predict(row: Row) -> int:
    """The row's figure of a few steps, in bytes."""
    assert row.source.environment is not None
    script, folder = SCRIPTS[row.source.name], ready(ENVIRONMENTS[row.source.environment])
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        output = StringIO()
        for manager in (chdir(scratch), redirect_stdout(output), redirect_stderr(output), patch.dict(os.environ)):
            stack.enter_context(manager)
        sys.modules.update(script.modules(folder))
        program = scratch / "train.py"
        program.write_text(_changed((folder / script.path(row.values)).read_text(), script.changes(row.values)))
        on_several: dict[str, Any] = {"gpus": int(row.values["gpus"])} if "gpus" in row.values else {}
        run = memsize.run(
            program,
            script.arguments(row.values),
            gpu=row.source.gpu,
            stack=row.source.stack,
            **script.options,
            **on_several,
        )
    assert isinstance(run, memsize.ProgramRun)
    return int(getattr(run.peak, row.figure))


def _changed(text: str, changes: tuple[Change, ...]) -> str:
    for old, new in changes:
        assert old in text, f"the script has no {old!r}"
        text = text.replace(old, new)
    return text


# -- "Build a Large Language Model From Scratch", chapter 5, training speed --------------------------------------------

_CHARACTERS: Final = 1_800_000
"""Of Middlemarch, whose text is not needed."""


def _words(_folder: Path) -> Mapping[str, Any]:
    Path("middlemarch.txt").write_text("a" * _CHARACTERS)
    encoding = SimpleNamespace(
        encode=lambda text, **_: [0] * max(4, len(text) // 4), decode=lambda tokens: "a" * len(tokens)
    )
    plots = ("matplotlib", "matplotlib.pyplot", "matplotlib.ticker", "requests")
    return {"tiktoken": MagicMock(get_encoding=lambda name: encoding), **{name: MagicMock() for name in plots}}


def _book_changes(setting: Setting) -> tuple[Change, ...]:
    return (
        ("num_workers=4", "num_workers=0"),
        ('"vocab_size": 50304', f'"vocab_size": {setting["vocabulary"]}'),
        ('"batch_size": 32', f'"batch_size": {setting["batch"]}'),
    )


# -- torchao's trainings -----------------------------------------------------------------------------------------------


def _images(_folder: Path) -> Mapping[str, Any]:
    import torch

    class Images:
        """Blank ones, as many as resisc45 has."""

        def select_columns(self, names: list[str]) -> Images:
            return self

        def set_transform(self, transform: object) -> None:
            return None

        def __len__(self) -> int:
            return 18_900

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"image": torch.zeros(3, 224, 224), "label": 0}

    datasets: Any = ModuleType("datasets")
    datasets.load_dataset = lambda *_, **__: Images()
    return {"datasets": datasets, "bitsandbytes": MagicMock(), "wandb": MagicMock()}


def _stories(folder: Path) -> Mapping[str, Any]:
    import torchao.optim

    model = module_of(folder / "torchao/_models/llama/model.py", "torchao._models.llama.model")
    return {
        "wandb": MagicMock(),
        "torchao._models": ModuleType("torchao._models"),
        "torchao._models.llama": ModuleType("torchao._models.llama"),
        "torchao._models.llama.model": model,
        "torchao.prototype.low_bit_optim": torchao.optim,
    }


_LOADED: Final = "data = get_tinystories().cuda()"
_LLAMA: Final = ("--model", "1B", "--activation_checkpointing", "--compile", "--seed", "2024")
_QUANTIZED: Final[Mapping[str, tuple[str, ...]]] = {"bf16": (), "int8": ("--quantize", "int8_weight_only")}
_VIT: Final = (
    *("--model", "vit_huge_patch14_224.orig_in21k", "--amp", "bf16", "--compile", "--batch_size", "8"),
    *("--n_epochs", "1", "--n_workers", "0", "--cosine_lr_scheduler"),
)
_TWO_STEPS: Final = {"steps": 2, "training_only": True}

# -- torchtune's fine-tuning, one option after the other ---------------------------------------------------------------

_OPTIONS: Final = (
    ("compile", "True"),
    ("loss", "torchtune.modules.loss.CEWithChunkedOutputLoss"),
    ("enable_activation_checkpointing", "True"),
    ("optimizer_in_bwd", "True"),
    ("enable_activation_offloading", "True"),
    ("optimizer", "torchao.prototype.low_bit_optim.AdamW8bit"),
)
"""Each is added to those before it; LoRA has neither of those about the optimizer."""
_WITHOUT: Final = {name: "False" for name, _ in _OPTIONS} | {
    "loss": "torch.nn.CrossEntropyLoss",
    "optimizer": "torch.optim.AdamW",
}
_SAMPLES: Final = 1200


def _instructions(folder: Path) -> Mapping[str, Any]:
    """Weights of zeros, a tokenizer of bytes, and as many samples as fill some batches."""
    here = Path.cwd()
    declare()
    shutil.copytree(folder / "recipes/configs/llama3_2", "configs")
    for maker in (
        data.preset("meta-llama/Llama-3.2-3B", "llama"),
        data.zeros("llama"),
        data.byte_tokenizer("llama/tokenizer.model"),
        data.rows("alpaca/train.json", _SAMPLES, instruction="Count words.", input="", output="word " * 60),
    ):
        maker(here)
    return {}


def _tuned(setting: Setting) -> tuple[str, ...]:
    adapts = setting["options"] == "lora"
    count = len(_OPTIONS) if adapts else int(setting["options"])
    chosen = _WITHOUT | dict(_OPTIONS[:count])
    if adapts:
        chosen |= {"optimizer": _WITHOUT["optimizer"], "optimizer_in_bwd": "False"}
    if chosen["optimizer"] == _WITHOUT["optimizer"]:
        chosen["optimizer.fused"] = "True"
    chosen |= {
        "checkpointer.checkpoint_files": "[model-00001-of-00002.safetensors,model-00002-of-00002.safetensors]",
        "checkpointer.checkpoint_dir": "llama", "checkpointer.output_dir": "out", "output_dir": "out",
        "tokenizer.path": "llama/tokenizer.model", "tokenizer.max_seq_len": "4096", "dataset.packed": "True",
        "dataset.source": "json", "dataset.data_files": "alpaca/train.json", "batch_size": "2", "epochs": "1",
        "gradient_accumulation_steps": "1",
    }  # fmt: skip
    kind = "lora" if adapts else "full"
    return "--config", f"configs/3B_{kind}_single_device.yaml", *(f"{name}={value}" for name, value in chosen.items())


SCRIPTS: Final = {
    "torchtune/llama-3.2-3b": Script(
        path=lambda setting: f"recipes/{'lora' if setting['options'] == 'lora' else 'full'}_finetune_single_device.py",
        changes=lambda setting: (),
        modules=_instructions,
        arguments=_tuned,
        options={"steps": 3, "training_only": True},
    ),
    "compiled-book/gpt": Script(
        path=lambda setting: f"ch05/10_llm-training-speed/{setting['script']}.py",
        changes=_book_changes,
        modules=_words,
        arguments=lambda setting: (),
        options={"steps": 3},
    ),
    "compiled-torchao/vit-huge": Script(
        path=lambda setting: "benchmarks/benchmark_low_bit_adam.py",
        changes=lambda setting: (("pretrained=True", "pretrained=False"),),
        modules=_images,
        arguments=lambda setting: (*_VIT, "--optim", setting["optimizer"]),
        options=_TWO_STEPS,
    ),
    "compiled-torchao/llama2-1b": Script(
        path=lambda setting: "benchmarks/quantized_training/pretrain_llama2.py",
        changes=lambda setting: (
            (_LOADED, f"data = torch.empty({TOKENS}, dtype=torch.uint16).cuda()"),
            (", set_inductor_config=False", ""),
            ("from torchao.prototype import low_bit_optim", "from torchao import optim as low_bit_optim"),
        ),
        modules=_stories,
        arguments=lambda setting: (
            _LLAMA if setting["weights"] == "bf16" else (*_LLAMA, "--quantize", "int8_weight_only")
        ),
        options=_TWO_STEPS,
    ),
}
