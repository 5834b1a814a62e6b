"""What a command is about, as values: the target with its inputs, and the training that is asked for.

Everything that can be wrong with them shows before torch is loaded.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import click
from click.shell_completion import CompletionItem

from memsize.cli.values import grouped
from memsize.errors import InputError
from memsize.loading.target import parse_target
from memsize.records.run_file import is_run_file
from memsize.spec.inputs import parse_inputs
from memsize.spec.model_request import Mode, ModelRequest
from memsize.spec.training import LOSSES, Training


def _subject(target: str, maker: str | None, **given: Any) -> ModelRequest:
    if not is_run_file(target):
        parse_target(target)
    return replace(_question(maker=maker, **given), model=target)


def _question(
    inputs: tuple[str, ...],
    maker: str | None,
    seq_len: int | None,
    arguments: tuple[str, ...],
    batch_size: int | None,
    mode: Mode | None,
) -> ModelRequest:
    if maker is not None:
        if inputs:
            raise InputError("give the inputs with --input or with --inputs, not with both")
        parse_target(maker)
    specs, built_with = parse_inputs(inputs), parse_arguments(arguments)
    return ModelRequest("", specs, None, maker, batch_size, seq_len, built_with, mode)


def _generating(target: str, inputs: tuple[str, ...], arguments: tuple[str, ...]) -> ModelRequest:
    rest = {"seq_len": None, "batch_size": None, "mode": "eval"}
    return _subject(target, None, inputs=inputs, arguments=arguments, **rest)


def parse_arguments(texts: Iterable[str]) -> dict[str, object]:
    """The arguments that ``name=value`` texts give: Python literals, and anything else as the string it is.

    Raises `InputError` for a text without a name, and for a name that comes twice.
    """
    arguments: dict[str, object] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name.isidentifier():
            raise InputError(f"cannot read the argument {text!r}: write it like width=64")
        if name in arguments:
            raise InputError(f"the argument {name!r} is given twice")
        arguments[name] = _literal(value)
    return arguments


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _training(train: str | None, loss: str | None, accumulate: int, ema: bool, steps: int = 3) -> Training | None:
    return Training(train, loss, steps, accumulate, ema=ema) if train else None


def _files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What a shell completes a target with: the names of files."""
    return [CompletionItem(incomplete, type="file")]


_TARGET = click.argument("target", shell_complete=_files)
_INPUTS = (
    click.option(
        "-i",
        "--input",
        "inputs",
        multiple=True,
        metavar="SHAPE",
        help="Shape of an input without its batch dimension: 3,64,64, ids=512:int64, 3,64,64:float16. Repeatable.",
    ),
    click.option(
        "--inputs",
        "maker",
        metavar="FUNCTION",
        shell_complete=_files,
        help="Function that returns the inputs: file.py:make_inputs. It receives batch_size if it has that parameter.",
    ),
    click.option(
        "--seq-len",
        type=click.IntRange(min=1),
        metavar="N",
        help="Tokens per text for hf: models. [default: 512, or what fits]",
    ),
)
_BATCH = click.option(
    "-b",
    "--batch-size",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Samples per batch.",
)
_ARGUMENTS = click.option(
    "--arg",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Argument for the constructor or function: a Python literal, or a bare word for a string. Repeatable.",
)
_MODE = click.option(
    "--mode",
    default="train",
    show_default=True,
    type=click.Choice(["train", "eval"]),
    help="Run the model in training or evaluation mode.",
)
_FIT_BATCH = click.option(
    "-b",
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Check whether this batch fits, and what would make it fit. With --vary: the fixed batch size.",
)
_FIT_MODE = click.option(
    "--mode",
    type=click.Choice(["train", "eval"]),
    help="Run the model in training or evaluation mode. [default: train with --train, else eval]",
)
_TRAIN = click.option(
    "--train",
    metavar="OPTIMIZER",
    help="Run training steps with this optimizer: adamw, adamw:fused, sgd:momentum=0.9 …; own: the step of a "
    "LightningModule or a Hugging Face Trainer.",
)
_STEPS = click.option(
    "--steps", default=3, show_default=True, type=click.IntRange(min=1), help="Training steps to run."
)
_STEP = (
    click.option("--loss", metavar="NAME", help=f"Loss: {', '.join(LOSSES)}. [default: one that suits the output]"),
    click.option("--accumulate", default=1, type=click.IntRange(min=1), help="Backward passes per training step."),
    click.option("--ema", is_flag=True, help="Keep an averaged copy of the parameters during training."),
)

subject_options = grouped("subject", (_TARGET, *_INPUTS, _BATCH, _ARGUMENTS, _MODE), _subject)
"""The parameter `subject`: a `ModelRequest` with the size of its batch and its mode."""

several_subjects_options = grouped("subject", (*_INPUTS, _BATCH, _ARGUMENTS, _MODE), _question)
"""The same for a command that names its targets itself: a `ModelRequest` of the model ``""``."""

generation_subject_options = grouped("subject", (_TARGET, _INPUTS[0], _ARGUMENTS), _generating)
"""The same for a model that generates: its prompts and batches are asked for by options of their own."""

fit_subject_options = grouped("subject", (_TARGET, *_INPUTS, _FIT_BATCH, _ARGUMENTS, _FIT_MODE), _subject)
"""The same where a batch is asked about only if one is given, and the mode follows the training."""

training_options = grouped("training", (_TRAIN, _STEPS, *_STEP), _training)
"""The parameter `training`: a `Training`, or None for inference."""

step_options = grouped("training", (_TRAIN, *_STEP), _training)
"""The same without the number of steps."""
