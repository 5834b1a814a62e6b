"""`memsize fit`: the largest batch, and what would make it fit."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Literal

import click

from memsize.cli.options import check_maker, output_options, parse_unit
from memsize.cli.output import destination
from memsize.cli.progress import Progress
from memsize.cli.report import parse_arguments
from memsize.device import AllocatorConfig
from memsize.fitting.budget import LOCAL, budgets
from memsize.fitting.vary import parse_vary
from memsize.inputs import parse_inputs
from memsize.loading.target import parse_target
from memsize.scenario import DEFAULT, select
from memsize.training import LOSSES, Training


@click.command(
    short_help="The largest batch that fits, and what would make it fit.",
    epilog="""\b
    Examples:
      memsize fit model.py:Net --input 3,224,224 --train adamw --gpu t4
      memsize fit model.py:Net --input 3,224,224 --train adamw --gpu t4,a100,h100
      memsize fit model.py:Net --input 3,224,224 --train adamw --gpu t4 --batch 256
      memsize fit nets:gpt --input input_ids=512:int64 --vary seq_len --batch 8 --budget 24GB
    """,
)
@click.argument("target")
@click.option(
    "-i",
    "--input",
    "inputs",
    multiple=True,
    metavar="SHAPE",
    help="Input without its batch dimension: 3,64,64, input_ids=512:int64 or 3,64,64:float16. Repeat for several.",
)
@click.option(
    "--inputs",
    "maker",
    metavar="FUNCTION",
    help="Function that returns the inputs, as file.py:make_inputs; it is given the batch_size if it takes one.",
)
@click.option(
    "--seq-len",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens of the texts that hf: models are given. [default: 512, or what fits]",
)
@click.option(
    "-b",
    "--batch",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ask whether this batch fits, and what would make it. With --vary: the batch that it is searched at.",
)
@click.option(
    "--vary",
    default="batch",
    show_default=True,
    metavar="WHAT",
    help="What to enlarge: batch, seq_len, image, or dimensions of inputs such as 0:1 or input_ids:1 (0 is the batch).",
)
@click.option("--gpu", metavar="NAMES", help="GPUs, separated by commas: t4, a100, h100 …, or local. [default: a100]")
@click.option("--budget", metavar="SIZE", help="The memory of the device instead of the card's: 15109MiB, 24GB.")
@click.option("--margin", default="0", metavar="SIZE", help="Memory to leave free: 500MiB, or 5% of the device.")
@click.option(
    "-s",
    "--scenario",
    "scenarios",
    metavar="NAMES",
    help=f"Scenarios separated by commas, or all. [default: {', '.join(DEFAULT)}]",
)
@click.option(
    "--train",
    metavar="OPTIMIZER",
    help="Run training steps with this optimizer: adamw, adamw:fused, sgd:momentum=0.9 … [default: inference]",
)
@click.option("--loss", metavar="NAME", help=f"Loss of the training: {', '.join(LOSSES)}. [default: by the output]")
@click.option("--accumulate", default=1, type=click.IntRange(min=1), help="Backwards per training step.")
@click.option("--ema", is_flag=True, help="Keep an averaged copy of the parameters in training.")
@click.option(
    "--mode",
    type=click.Choice(["train", "eval"]),
    help="Run the model as in training or as in evaluation. [default: train with --train, else eval]",
)
@click.option(
    "--remedies/--no-remedies",
    default=None,
    help="Try what would make it fit. [default: where the batch that is asked for does not]",
)
@click.option("--crossovers", is_flag=True, help="Say from which size on autocast pays and where the peak moves.")
@click.option(
    "--allocator",
    metavar="SETTINGS",
    help="The caching allocator's settings, as PYTORCH_CUDA_ALLOC_CONF has them: expandable_segments:True …",
)
@click.option(
    "--arg",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Argument of the constructor or function, as a Python literal; a bare word is a string. Repeatable.",
)
@output_options
def fit(
    target: str,
    inputs: tuple[str, ...],
    maker: str | None,
    seq_len: int | None,
    batch: int | None,
    vary: str,
    gpu: str | None,
    budget: str | None,
    margin: str,
    scenarios: str | None,
    train: str | None,
    loss: str | None,
    accumulate: int,
    ema: bool,
    mode: Literal["train", "eval"] | None,
    remedies: bool | None,
    crossovers: bool,
    allocator: str | None,
    arguments: tuple[str, ...],
    unit: str,
    format: str | None,
    file: Path | None,
    force: bool,
) -> None:
    """The largest batch of TARGET that fits a GPU, scenario by scenario, found by running it and the next.

    TARGET is path.py:Name, package.module:name or a library's model such as hf:llama, as memsize report takes it.
    Of the GPU's memory the CUDA context and the margin are taken off; what is left is the caching allocator's.
    """
    # Everything that can be wrong with the command itself shows before torch is loaded.
    parse_target(target)
    check_maker(maker, inputs)
    parse_vary(vary)
    specs, values, settings = parse_inputs(inputs), parse_arguments(arguments), AllocatorConfig.parse(allocator or "")
    select(scenarios)
    if LOCAL not in (gpu or ""):
        budgets(gpu, budget, margin)
    training = Training(train, loss, accumulate=accumulate, ema=ema) if train else None
    where, unit = destination(file, format, force), parse_unit(unit)

    # What the user's model prints goes to stderr: stdout holds the answer and nothing else.
    with Progress() as progress, contextlib.redirect_stdout(sys.stderr):
        from memsize import api
        from memsize.render.fit import render

        found = api.fit(
            target,
            inputs=specs,
            input_data=maker,
            seq_len=seq_len,
            batch=batch,
            vary=vary,
            scenarios=scenarios,
            train=training,
            mode=mode,
            gpu=gpu,
            budget=budget,
            margin=margin,
            config=settings,
            remedies=remedies,
            crossovers=crossovers,
            arguments=values,
            progress=progress,
        )
        progress("writing the answer")
        text = render(found, where.format, unit=unit, width=where.width)
    where.write(text)
