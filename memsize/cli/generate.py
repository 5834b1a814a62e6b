"""`memsize generate`: what prefill, decode and the KV cache of a language model hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from memsize.cli.options import (
    allocator_option,
    gpu_option,
    jobs_option,
    output_options,
    scenarios_option,
    stack_option,
)
from memsize.cli.output import Destination
from memsize.cli.saved import is_saved
from memsize.cli.subject import generation_subject_options
from memsize.cli.values import grouped, listed
from memsize.cli.working import working
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import card
from memsize.errors import InputError
from memsize.processes.workers import side_by_side
from memsize.records.gpu import DEFAULT_GPU
from memsize.spec.generation import CACHES, KV_DTYPES, Draft, Generation
from memsize.spec.model_request import ModelRequest
from memsize.spec.scenario import select
from memsize.spec.stack import Stack


def counts(text: str, what: str) -> tuple[int, ...]:
    """Whole numbers separated by commas: ``1,8,32``. Raises `InputError` where `text` has no such."""
    try:
        found = tuple(int(part.replace("_", "")) for part in text.split(","))
    except ValueError:
        raise InputError(f"cannot read {text!r} as {what}: write it like 1,8,32") from None
    return found


def _generations(prompt: str, assistant: str | None, lookup: int | None, **held: Any) -> tuple[Generation, ...]:
    draft = Draft.of(assistant, lookup)
    return tuple(Generation(length, draft=draft, **held) for length in sorted(set(counts(prompt, "prompts"))))


_COUNT = click.IntRange(min=1)
_UNEVEN = click.option("--uneven", is_flag=True, help="Prompts are of unequal lengths, padded to the longest.")
_DRAFTS = (
    click.option("--assistant", metavar="TARGET", help="A smaller model, which proposes tokens before each step."),
    click.option("--lookup", type=_COUNT, metavar="N", help="N tokens before each step, looked up in the prompt."),
)

generation_options: Callable[..., Any] = grouped(
    "generations",
    (
        listed(
            "--prompt", default="512", show_default=True, metavar="N,…", help="Tokens of the prompt; several lengths."
        ),
        click.option("--new", default=128, show_default=True, type=_COUNT, metavar="N", help="Tokens to generate."),
        click.option(
            "--cache", type=click.Choice(CACHES), help="The cache that generate uses. [default: the model's own choice]"
        ),
        click.option("--kv-dtype", type=click.Choice(list(KV_DTYPES)), help="Keep the cache quantized."),
        click.option("--beams", default=1, type=_COUNT, metavar="N", help="Beams of a beam search."),
        click.option("--chunk", type=_COUNT, metavar="N", help="Read the prompt N tokens at a time."),
        _UNEVEN,
        *_DRAFTS,
    ),
    _generations,
)


generating_options: Callable[..., Any] = grouped(
    "generating",
    (
        click.option("--new", type=_COUNT, metavar="N", help="Generate N tokens for each sequence of the batch."),
        click.option("--prompt", type=_COUNT, metavar="N", help="Generate after a prompt of N tokens. [default: 512]"),
        click.option("--cache", type=click.Choice(CACHES), help="Generate with this cache."),
        click.option("--kv-dtype", type=click.Choice(list(KV_DTYPES)), help="Generate with a quantized cache."),
        click.option("--beams", type=_COUNT, metavar="N", help="Generate with a beam search of that width."),
        click.option("--chunk", type=_COUNT, metavar="N", help="Read the prompt N tokens at a time."),
        _UNEVEN,
    ),
    dict,
)
"""What a command that can also be about something else is asked about a generation: None for what was not said."""


@click.command(
    short_help="Show what prefill, decode and the KV cache hold.",
    epilog="""\b
    Examples:
      memsize generate hf:config.json --prompt 8192 --new 512 --gpu h100
      memsize generate hf:config.json --prompt 2048,8192,32768 --batch 1,8,32 -s bf16,int4-weight
      memsize generate hf:config.json --cache static -o generate.html
    """,
)
@generation_subject_options
@generation_options
@listed("-b", "--batch", default="1", show_default=True, metavar="N,…", help="Sequences at once; several sizes.")
@click.option("--step", metavar="FUNCTION", help="A loop in place of generate: file.py:function.")
@scenarios_option
@gpu_option
@stack_option
@allocator_option
@jobs_option
@output_options
def generate(
    subject: ModelRequest,
    generations: tuple[Generation, ...],
    batch: str,
    step: str | None,
    scenarios: str | None,
    gpu: str | None,
    stack: str | None,
    allocator: str | None,
    jobs: int | None,
    output: Destination,
) -> None:
    """Show what TARGET holds while it generates tokens: reading the prompt, each step after it, and the KV cache.

    TARGET is a model with a generate method: hf:NAME, or path.py:Name as for memsize report. Its own generate runs.
    """
    # Everything that can be wrong with the command itself shows before torch is loaded.
    where, software, batches = card(gpu or DEFAULT_GPU), Stack.of(stack), counts(batch, "batches")
    config, draft = AllocatorConfig.of(allocator, software.release), generations[0].draft
    if scenarios is not None:
        select(scenarios)

    # What the user's model prints goes to stderr: stdout holds the answer and nothing else.
    with working() as progress, side_by_side(jobs):
        from memsize import api
        from memsize.analysis.saved_runs import load_kind

        found = (
            load_kind(str(subject.model), "generation")
            if is_saved(subject.model)
            else api.generate(
                subject,
                prompt=[each.prompt for each in generations],
                new=generations[0].new,
                cache=generations[0].cache,
                kv_dtype=generations[0].kv_dtype,
                beams=generations[0].beams,
                chunk=generations[0].chunk,
                uneven=generations[0].uneven,
                assistant=draft.assistant if draft else None,
                lookup=draft.tokens if draft and draft.assistant is None else None,
                step=step,
                batches=batches,
                scenarios=scenarios,
                gpu=where.name,
                stack=software,
                config=config,
                progress=progress,
            )
        )
        progress("writing the answer")
        output.keep(found)
        text = output.drawn(found)
    output.write(text)
