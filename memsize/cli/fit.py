"""`memsize fit`: the largest batch that fits, and what would make a larger one fit."""

from __future__ import annotations

from dataclasses import replace

import click

from memsize.cli.command import RequestCommand, answer, command, jobs_option, parts_shown
from memsize.cli.output import Destination
from memsize.cli.working import say
from memsize.spec.requests import FitRequest, FitScriptRequest


class _FitCommand(RequestCommand):
    """`memsize fit`, which was also `memsize fit-script` once: with --vary-argument it still is."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, or run `memsize fit-script` with them."""
        before = args[: args.index("--")] if "--" in args else args
        if any(argument.partition("=")[0] == "--vary-argument" for argument in before):
            say("memsize fit --vary-argument is now memsize fit-script")
            with fit_script.make_context("fit-script", args, parent=ctx.parent, allow_interspersed_args=True) as script:
                fit_script.invoke(script)
            ctx.exit()
        return super().parse_args(ctx, args)


@command(
    FitRequest,
    cls=_FitCommand,
    also=(jobs_option,),
    epilog="""\b
    Examples:
      memsize fit model.py:Net --input 3,224,224 --train adamw --gpu t4
      memsize fit model.py:Net --input 3,224,224 --train adamw --gpu t4,a100,h100
      memsize fit model.py:Net --input 3,224,224 --train adamw --gpu t4 --batch-size 256
      memsize fit hf:config.json --seq-len 2048 --train adamw --gpu h100 --parallel fsdp --gpus 1..64
      memsize fit nets:gpt --input input_ids=512:int64 --vary seq_len --batch-size 8 --budget 24GB
      memsize fit hf:config.json --vary context --max-new-tokens 512 --batch-size 8 --gpu h100
    """,
)
def fit(request: FitRequest, output: Destination, jobs: int | None) -> None:
    """Find the largest batch of TARGET that fits on a GPU, scenario by scenario.

    The answer and the next larger batch are both run. TARGET is path.py:Name, package.module:name or a library's model
    such as hf:llama, as for memsize report. The caching allocator gets the GPU's memory minus the CUDA context and the
    margin.
    """
    answer(
        output,
        "fit",
        request.model.model,
        ask=lambda api, progress: api.fit(request, **parts_shown(progress, output)),
        jobs=jobs,
    )


@command(
    FitScriptRequest,
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
    Examples:
      memsize fit-script --gpu t4 --vary-argument batch-size train.py --batch-size 8
      memsize fit-script --gpu t4,a100 --vary-argument train.batch_size train.py train.batch_size=8

    \b
    Options of memsize come before the script, the script's own after it.
    """,
)
def fit_script(request: FitScriptRequest, output: Destination) -> None:
    """Find the largest value of an argument of SCRIPT with which it fits on a GPU.

    SCRIPT is run as by memsize run, with one value after another.
    """
    arguments = tuple(request.arguments)
    if arguments[:1] == ("--",):  # as after `memsize fit --vary-argument … SCRIPT`, which this was called before
        request = replace(request, arguments=arguments[1:])
    answer(
        output,
        "fit",
        request.script,
        ask=lambda api, progress: api.fit_script(request, **parts_shown(progress, output)),
    )
