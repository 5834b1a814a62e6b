"""Options that commands share: what is run and how, how sizes are drawn, in which format, and where to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from memsize.cli.session import Session
from memsize.errors import InputError, OutputError
from memsize.loading.target import parse_target
from memsize.nearest import suggestion
from memsize.render import FORMATS
from memsize.training import LOSSES
from memsize.units import DECIMAL, UNITS

Command = TypeVar("Command", bound=Callable[..., Any])


def run_options(command: Command) -> Command:
    """Give `command` the argument `target` and what says how to run it: its input, its constructor, its training."""
    return _with(command, (*_INPUT, *_TRAINING))


def input_options(command: Command) -> Command:
    """Give `command` the argument `target` and what says how to build it, what it is given and in which mode."""
    return _with(command, _INPUT)


def output_options(command: Command, formats: Iterable[str] = FORMATS) -> Command:
    """Give `command` the parameters `unit`, `format` (one of `formats`), `file` and `force`, and the flag --debug."""
    return _with(command, (_UNITS, _format_option(formats), *_OUTPUT))


def _with(command: Command, options: Iterable[Callable[[Command], Command]]) -> Command:
    for option in reversed(tuple(options)):
        command = option(command)
    return command


def parse_unit(text: str) -> str:
    """The unit called `text`, in any case: mib and MIB are MiB."""
    known = (*UNITS, *DECIMAL)
    found = text if text in known else next((unit for unit in known if unit.lower() == text.lower()), None)
    if found is None:
        raise OutputError(f"no unit {text!r}: {suggestion(text, known)}")
    return found


def check_maker(maker: str | None, inputs: tuple[str, ...]) -> None:
    """Raise `InputError` or `TargetError` for what cannot be the value of --inputs, beside those of --input."""
    if maker is not None:
        if inputs:
            raise InputError("give the inputs with --input or with --inputs, not with both")
        parse_target(maker)


def _set_debug(context: click.Context, _: click.Parameter, debug: bool) -> None:
    session = context.find_object(Session)
    if session is not None:
        session.debug = debug


_INPUT = (
    click.argument("target"),
    click.option(
        "-i",
        "--input",
        "inputs",
        multiple=True,
        metavar="SHAPE",
        help="Input without its batch dimension: 3,64,64, input_ids=512:int64 or 3,64,64:float16. Repeat for several.",
    ),
    click.option(
        "--inputs",
        "maker",
        metavar="FUNCTION",
        help="Function that returns the inputs, as file.py:make_inputs; it is given the batch_size if it takes one.",
    ),
    click.option(
        "--seq-len",
        type=click.IntRange(min=1),
        metavar="N",
        help="Tokens of the texts that hf: models are given. [default: 512, or what fits]",
    ),
    click.option(
        "-b",
        "--batch-size",
        default=1,
        show_default=True,
        type=click.IntRange(min=1),
        metavar="N",
        help="Samples in the batch.",
    ),
    click.option(
        "--arg",
        "arguments",
        multiple=True,
        metavar="NAME=VALUE",
        help="Argument of the constructor or function, as a Python literal; a bare word is a string. Repeatable.",
    ),
    click.option(
        "--mode",
        default="train",
        show_default=True,
        type=click.Choice(["train", "eval"]),
        help="Run the model as in training or as in evaluation.",
    ),
)

_TRAINING = (
    click.option(
        "--train",
        metavar="OPTIMIZER",
        help="Run training steps with this optimizer: adamw, adamw:fused, sgd:momentum=0.9 …",
    ),
    click.option("--gpu", metavar="NAME", help="The GPU that is meant by peaks: a100, t4, h100 … [default: a100]"),
    click.option("--steps", default=3, show_default=True, type=click.IntRange(min=1), help="Training steps to run."),
    click.option("--loss", metavar="NAME", help=f"Loss of the training: {', '.join(LOSSES)}. [default: by the output]"),
    click.option("--accumulate", default=1, type=click.IntRange(min=1), help="Backwards per training step."),
    click.option("--ema", is_flag=True, help="Keep an averaged copy of the parameters in training."),
    click.option(
        "--allocator",
        metavar="SETTINGS",
        help="The caching allocator's settings, as PYTORCH_CUDA_ALLOC_CONF has them: expandable_segments:True …",
    ),
    click.option(
        "--execute", is_flag=True, help="Compute for real, on the CPU: for models whose way depends on their data."
    ),
)

_UNITS = click.option(
    "-u",
    "--units",
    "unit",
    default="MiB",
    show_default=True,
    metavar="UNIT",
    help="Unit of sizes: B, KiB, MiB, GiB, or the decimal kB, MB, GB.",
)


def _format_option(formats: Iterable[str]) -> Callable[[Command], Command]:
    return click.option(
        "-f",
        "--format",
        "format",
        metavar="FORMAT",
        help=f"One of {', '.join(formats)}. [default: by the suffix of -o, else text]",
    )


_OUTPUT = (
    click.option(
        "-o",
        "--output",
        "file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write to this file, in the format of its suffix.",
    ),
    click.option("--force", is_flag=True, help="Overwrite the file if it exists."),
    click.option(
        "--debug",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_set_debug,
        help="Show the traceback of an error.",
    ),
)
