"""`memsize diff`: what changed from one model, revision, saved run or checkpoint to another."""

from __future__ import annotations

from dataclasses import replace

import click
from click.shell_completion import CompletionItem

from memsize.cli.options import (
    allocator_option,
    execute_option,
    gpu_option,
    jobs_option,
    output_options,
    stack_option,
)
from memsize.cli.output import Destination
from memsize.cli.saved import refuse_options
from memsize.cli.subject import several_subjects_options, training_options
from memsize.cli.values import listed
from memsize.cli.working import working
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import card
from memsize.loading.revision import parse_revision
from memsize.loading.target import is_checkpoint, parse_target
from memsize.processes.workers import side_by_side
from memsize.records.gpu import DEFAULT_GPU
from memsize.records.run_file import is_run_file
from memsize.spec.model_request import ModelRequest
from memsize.spec.scenario import select
from memsize.spec.stack import Stack
from memsize.spec.training import Training


def _files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


@click.command(
    short_help="Show what changed from one version of a model to another.",
    epilog="""\b
    Examples:
      memsize diff HEAD~1:model.py:Net model.py:Net --input 3,224,224
      memsize diff main:model.py:Net model.py:Net --input 3,224,224 --train adamw --gpu t4 -o comment.md
      memsize diff old.py:Net new.py:Net --input 3,224,224 --scenario fp32,amp-bf16
      memsize diff before.memsize after.memsize
      memsize diff epoch1.ckpt epoch2.ckpt
    """,
)
@click.argument("before", shell_complete=_files)
@click.argument("after", shell_complete=_files)
@several_subjects_options
@training_options
@gpu_option
@stack_option
@allocator_option
@execute_option
@listed(
    "-s",
    "--scenario",
    "scenarios",
    default="as-given",
    show_default=True,
    metavar="NAMES",
    help="Scenarios to compare, separated by commas, or all.",
)
@jobs_option
@output_options
def diff(
    before: str,
    after: str,
    subject: ModelRequest,
    training: Training | None,
    gpu: str | None,
    stack: str | None,
    allocator: str | None,
    execute: bool,
    scenarios: str,
    jobs: int | None,
    output: Destination,
) -> None:
    """Show what changed from BEFORE to AFTER: layers, bytes by role and scenario, the peak and the findings.

    Each is a target of memsize report, such as model.py:Net, a target at a git revision, such as HEAD~1:model.py:Net, a
    saved run, or a checkpoint. A revision is checked out beside your files, which stay as they are. The options are
    those of memsize report and apply to both.
    """
    # Everything that can be wrong with the command itself shows before torch is loaded.
    select(scenarios)
    where, software = card(gpu or DEFAULT_GPU), Stack.of(stack)
    config = AllocatorConfig.parse(allocator, software.release) if allocator else None
    if not any([_is_run(before), _is_run(after)]):
        refuse_options(f"{before} and {after} are files")

    # What the user's model prints goes to stderr: stdout holds the comparison and nothing else.
    with working() as progress, side_by_side(1 if execute else jobs):
        from memsize import api

        found = api.compare(
            replace(subject, model=before),
            replace(subject, model=after),
            scenarios=scenarios,
            train=training,
            gpu=where.name,
            stack=software,
            config=config,
            execute=execute,
            progress=progress,
        )
        progress("writing the comparison")
        output.keep(found)
        text = output.drawn(found)
    output.write(text)


def _is_run(side: str) -> bool:
    """Whether a side is a model that has to be run; raises `TargetError` for what cannot be meant."""
    if is_run_file(side) or is_checkpoint(side):
        return False
    if parse_revision(side) is None:
        parse_target(side)
    return True
