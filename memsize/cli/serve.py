"""`memsize serve`: what a paged server such as vLLM holds, and how many requests it serves at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from memsize.cli.options import gpu_option, output_options, scenarios_option, stack_option
from memsize.cli.output import Destination
from memsize.cli.saved import is_saved
from memsize.cli.subject import generation_subject_options
from memsize.cli.values import grouped
from memsize.cli.working import working
from memsize.device.cards import card
from memsize.records.gpu import DEFAULT_GPU
from memsize.spec.model_request import ModelRequest
from memsize.spec.scenario import select
from memsize.spec.serving import KV_BYTES, Serving
from memsize.spec.stack import Stack


def _serving(
    utilization: float, block: int, batched: int, seqs: int, context: int | None, tp: int, kv_dtype: str | None
) -> Serving:
    return Serving(utilization, block, batched, seqs, context, tp, kv_dtype)


_COUNT = click.IntRange(min=1)

serving_options: Callable[..., Any] = grouped(
    "serving",
    (
        click.option(
            "--utilization",
            default=0.9,
            show_default=True,
            type=float,
            metavar="PART",
            help="The part of the card's memory that the server may take.",
        ),
        click.option("--block", default=16, show_default=True, type=_COUNT, metavar="N", help="Tokens of a block."),
        click.option(
            "--max-batched-tokens",
            "batched",
            default=8192,
            show_default=True,
            type=_COUNT,
            metavar="N",
            help="Tokens of one step at most.",
        ),
        click.option(
            "--max-seqs",
            "seqs",
            default=256,
            show_default=True,
            type=_COUNT,
            metavar="N",
            help="Sequences of one step at most.",
        ),
        click.option(
            "--context", type=_COUNT, metavar="N", help="Tokens of a request. [default: the model's positions]"
        ),
        click.option("--tp", default=1, show_default=True, type=_COUNT, metavar="N", help="Cards that share a layer."),
        click.option("--kv-dtype", type=click.Choice(list(KV_BYTES)), help="Keep the cache in this dtype."),
    ),
    _serving,
)


@click.command(
    short_help="Show how many tokens and requests a paged server has room for.",
    epilog="""\b
    Examples:
      memsize serve hf:config.json --gpu h100 --context 8192
      memsize serve hf:config.json --gpu h100 --tp 2 -s bf16,fp8-weight,int4-weight
      memsize serve hf:config.json --gpu l4 --utilization 0.95 --kv-dtype fp8
    """,
)
@generation_subject_options
@serving_options
@scenarios_option
@gpu_option
@stack_option
@output_options
def serve(
    subject: ModelRequest,
    serving: Serving,
    scenarios: str | None,
    gpu: str | None,
    stack: str | None,
    output: Destination,
) -> None:
    """Show what a paged server such as vLLM holds on a GPU: weights, its largest step, and the blocks of its KV cache.

    TARGET is a language model of transformers: hf:NAME, or path.py:Name as for memsize report.
    """
    # Everything that can be wrong with the command itself shows before torch is loaded.
    where, software = card(gpu or DEFAULT_GPU), Stack.of(stack)
    if scenarios is not None:
        select(scenarios)

    # What the user's model prints goes to stderr: stdout holds the answer and nothing else.
    with working() as progress:
        from memsize import api
        from memsize.analysis.saved_runs import load_kind

        found = (
            load_kind(str(subject.model), "serving")
            if is_saved(subject.model)
            else api.serve(
                subject,
                utilization=serving.utilization,
                block=serving.block,
                batched_tokens=serving.batched_tokens,
                seqs=serving.seqs,
                context=serving.context,
                tp=serving.tp,
                kv_dtype=serving.kv_dtype,
                scenarios=scenarios,
                gpu=where.name,
                stack=software,
                progress=progress,
            )
        )
        progress("writing the answer")
        output.keep(found)
        text = output.drawn(found)
    output.write(text)
