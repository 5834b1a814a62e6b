"""The trainings of OpenAI's parameter-golf, whose scripts compile their model: as they are, on one GPU or on each of
eight.

Their text is one of any tokens, and the tokenizer one that has as many words as they ask for.
"""

from __future__ import annotations

import os
import sys
from array import array
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import MagicMock, patch

import memsize
from benchmarks.published.environments import ENVIRONMENTS, ready
from benchmarks.published.rows import Row

STEPS: Final = 2
WORDS: Final = 1024
_TOKENS: Final = {"fineweb_train_0.bin": 1_200_000, "fineweb_val_0.bin": 300_000}
_HEADER: Final = (20240520, 1)
_SETTINGS: Final = {"WARMUP_STEPS": "0", "VAL_LOSS_EVERY": "0", "DATA_PATH": ".", "TOKENIZER_PATH": "words.model"}
"""Warm-up and validation take no more than training."""


def predict(row: Row) -> int:
    """The most that two steps allocate or reserve, in bytes."""
    assert row.source.environment is not None
    values: dict[str, Any] = {name: value for name, value in row.values.items() if name != "figure"}
    folder, record, gpus = ready(ENVIRONMENTS[row.source.environment]), values.pop("record"), int(values.pop("gpus"))
    settings = {**_SETTINGS, "RUN_ID": "run", **{name.upper(): value for name, value in values.items()}}
    steps = STEPS if gpus > 1 else 1  # of eight batches each
    _import_text()
    with (
        TemporaryDirectory() as scratch,
        chdir(scratch),
        patch.dict(os.environ, settings),
        redirect_stdout(StringIO()),
    ):
        for name, tokens in _TOKENS.items():
            _write(Path(name), tokens)
        script = folder / "records/track_10min_16mb" / record / "train_gpt.py"
        on_several: dict[str, Any] = {"gpus": gpus} if gpus > 1 else {}
        run = memsize.run(
            script, gpu=row.source.gpu, stack=row.source.stack, steps=steps, training_only=True, **on_several
        )
    assert isinstance(run, memsize.ProgramRun)
    return int(run.peak.reserved if row.figure == "reserved" else run.peak.allocated)


def _write(path: Path, tokens: int) -> None:
    header = array("i", (*_HEADER, tokens, *[0] * 253))
    path.write_bytes(header.tobytes() + bytes(2 * tokens))


def _import_text() -> None:
    """Stand in for what the scripts import for their text and for the file that they leave."""
    words = SimpleNamespace(
        vocab_size=lambda: WORDS,
        is_control=lambda number: False,
        is_unknown=lambda number: False,
        is_unused=lambda number: False,
        is_byte=lambda number: False,
        id_to_piece=lambda number: "word",
    )
    sys.modules.setdefault("sentencepiece", MagicMock(SentencePieceProcessor=lambda model_file: words))
    sys.modules.setdefault("zstandard", MagicMock())
