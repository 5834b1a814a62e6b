"""`memsize fit`: the largest batch that fits, and what would make a larger one fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click
from click.core import ParameterSource

from memsize.cli.generate import generating_options
from memsize.cli.options import (
    allocator_option,
    jobs_option,
    output_options,
    scenarios_option,
    stack_option,
)
from memsize.cli.output import Destination
from memsize.cli.saved import is_saved
from memsize.cli.subject import fit_subject_options, step_options
from memsize.cli.values import listed
from memsize.cli.working import working
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.budget import LOCAL, budgets
from memsize.errors import InputError
from memsize.processes.workers import side_by_side
from memsize.render.unit import USUAL
from memsize.spec.generation import asked_generation
from memsize.spec.model_request import ModelRequest
from memsize.spec.parallel import on_each, spread_of
from memsize.spec.scenario import select
from memsize.spec.stack import Stack
from memsize.spec.training import Training
from memsize.spec.vary import parse_vary


@click.command(
    short_help="Find the largest batch that fits, and how to fit a larger one.",
    epilog="""\b
    Examples:
      memsize fit model.py:Net --input 3,224,224 --train adamw --gpu t4
      memsize fit model.py:Net --input 3,224,224 --train adamw --gpu t4,a100,h100
      memsize fit model.py:Net --input 3,224,224 --train adamw --gpu t4 --batch-size 256
      memsize fit hf:config.json --seq-len 2048 --train adamw --gpu h100 --parallel fsdp --gpus 1..64
      memsize fit nets:gpt --input input_ids=512:int64 --vary seq_len --batch-size 8 --budget 24GB
      memsize fit hf:config.json --vary context --new 512 --batch-size 8 --gpu h100
      memsize fit --gpu t4 --vary-argument batch-size -- train.py --batch-size 8
    """,
)
@fit_subject_options
@click.option(
    "--vary",
    default="batch",
    show_default=True,
    metavar="WHAT",
    help="What to vary: batch, context, both as context,batch, seq_len, image, or dimensions such as 0:1 or "
    "input_ids:1 (0 is the batch).",
)
@generating_options
@click.option(
    "--vary-argument",
    "argument",
    metavar="NAME",
    help="Run TARGET, a script, and vary this argument of its own: batch-size for --batch-size 8 or batch_size=8.",
)
@listed("--gpu", metavar="NAMES", help="GPUs to simulate: t4, a100,h100 or local (this machine's). [default: a100]")
@click.option("--budget", metavar="SIZE", help="Memory of the device, instead of the GPU's: 15109MiB, 24GB.")
@click.option("--margin", default="0", metavar="SIZE", help="Memory to leave free: 500MiB, or 5% of the device.")
@scenarios_option
@step_options
@click.option(
    "--parallel",
    metavar="STRATEGY",
    multiple=True,
    help="Train on several GPUs: ddp=8[,views], fsdp=8[,offload] …, as for memsize timeline. Give several to "
    "compare them.",
)
@listed(
    "--gpus",
    metavar="NUMBERS",
    help="Numbers of GPUs to compare, for --parallel fsdp, ddp or hsdp=x8: 1..128 (doubling), or 6,12.",
)
@click.option(
    "--remedies/--no-remedies",
    default=None,
    help="Try what would make it fit. [default: if the batch in --batch-size doesn't fit]",
)
@click.option("--crossovers", is_flag=True, help="Report from which size autocast pays off, and where the peak moves.")
@stack_option
@allocator_option
@jobs_option
@output_options
@click.argument("script_arguments", metavar="[-- SCRIPT'S ARGUMENTS]", nargs=-1, type=click.UNPROCESSED)
def fit(
    subject: ModelRequest,
    vary: str,
    argument: str | None,
    gpu: str | None,
    budget: str | None,
    margin: str,
    scenarios: str | None,
    training: Training | None,
    parallel: tuple[str, ...],
    gpus: str | None,
    generating: dict[str, Any],
    remedies: bool | None,
    crossovers: bool,
    stack: str | None,
    allocator: str | None,
    jobs: int | None,
    output: Destination,
    script_arguments: tuple[str, ...],
) -> None:
    """Find the largest batch of TARGET that fits on a GPU, scenario by scenario.

    The answer and the next larger batch are both run. TARGET is path.py:Name, package.module:name or a library's model
    such as hf:llama, as for memsize report. The caching allocator gets the GPU's memory minus the CUDA context and the
    margin.
    """
    if argument is not None:
        _refuse_model_options()
        asked = {"gpu": gpu, "budget": budget, "margin": margin, "config": allocator}
        script = str(subject.model)
        _answer(output, lambda api, show: api.fit_script(script, script_arguments, vary=argument, **show, **asked))
        return
    if script_arguments:
        raise InputError(f"unexpected {' '.join(script_arguments)}: only a script with --vary-argument takes arguments")
    question: dict[str, Any] = {
        "vary": vary,
        "scenarios": scenarios,
        "train": training,
        "parallel": parallel,
        "gpus": gpus,
        "gpu": gpu,
        "budget": budget,
        "margin": margin,
        "stack": Stack.of(stack),
        "config": AllocatorConfig.of(allocator, Stack.of(stack).release),
        "remedies": remedies,
        "crossovers": crossovers,
        **generating,
    }
    _check(**question)
    with side_by_side(jobs):
        _answer(output, lambda api, show: _saved(subject) or api.fit(subject, **show, **question))


def _check(
    *,
    vary: str,
    scenarios: str | None,
    train: Training | None,
    parallel: tuple[str, ...],
    gpus: str | None,
    gpu: str | None,
    budget: str | None,
    margin: str,
    stack: Stack,
    config: AllocatorConfig,
    remedies: bool | None,
    crossovers: bool,
    **generating: Any,
) -> None:
    """Everything that can be wrong with the command itself shows before torch is loaded."""
    asked_generation(parse_vary(vary), **generating)
    select(scenarios)
    for each in on_each(parallel, gpus):
        spread_of(each, train)
    if LOCAL not in (gpu or ""):
        budgets(gpu, budget, margin, stack, config.memory_fraction)


def _saved(subject: ModelRequest) -> Any:
    """The answer in a saved run, where the target is one."""
    from memsize.analysis.saved_runs import load_kind

    return load_kind(str(subject.model), "fit") if is_saved(subject.model) else None


def _answer(output: Destination, ask: Callable[[Any, dict[str, Any]], Any]) -> None:
    # What the user's model prints goes to stderr: stdout holds the answer and nothing else.
    with output.told_if_interrupted(), working() as progress:
        from memsize import api

        unit = output.unit or USUAL
        found = ask(api, {"progress": progress, "found": lambda part: progress.found(part.text(unit))})
        progress("writing the answer")
        output.keep(found)
        text = output.drawn(found)
    output.write(text)


_OF_SCRIPTS: Final = frozenset(
    "target script_arguments argument gpu budget margin allocator unit format file save force debug".split()
)


def _refuse_model_options() -> None:
    """A script brings its own model, data and optimizer."""
    context = click.get_current_context()
    for option in context.command.params:
        given = context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
        if given and option.name not in _OF_SCRIPTS:
            raise InputError(
                f"{max(option.opts, key=len)} is for models: a script with --vary-argument says that itself"
            )
